// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "storage/acquire_operation.h"
#include "storage/coverage.h"
#include "storage/three_tier_store.h"

namespace crumb::storage {
namespace {

// How far behind the durable recency may be while pages are read.
constexpr Duration kRecencySyncInterval = std::chrono::seconds(5);

// Leaves out the fragments of pages from `pages` on.
void CutFragments(size_t pages, std::vector<FragmentRef>* fragments) {
  fragments->erase(
      std::partition_point(fragments->begin(), fragments->end(),
                           [&](const FragmentRef& fragment) { return fragment.page < pages; }),
      fragments->end());
}

// Ends the prefix before the page with which the answer would name more fragments than it may.
void CutPrefix(size_t pages, AcquireResult* result) {
  result->hit_pages = static_cast<uint32_t>(pages);
  result->page_tiers.resize(pages);
  CutFragments(pages, &result->fragments);
  result->miss_reason = MissReason::kBusy;
}

}  // namespace

void ThreeTierStore::Acquire(AcquireRequest request,
                             std::function<void(absl::StatusOr<AcquireResult>)> done) {
  if (stopped_) return done(Stopped());
  if (!request.pools.empty()) {
    std::vector<DeviceTier::PlacesOf> pages = devices_.Ref(request);
    const bool any =
        std::any_of(pages.begin(), pages.end(), [](const auto& places) { return !places.empty(); });
    if (any) return AcquireBeside(std::move(request), std::move(pages), std::move(done));
  }
  AcquireBelow(std::move(request), std::move(done));
}

void ThreeTierStore::AcquireBeside(AcquireRequest request, std::vector<DeviceTier::PlacesOf> pages,
                                   std::function<void(absl::StatusOr<AcquireResult>)> done) {
  AcquireRequest rest = request;
  rest.keys.clear();
  std::vector<uint32_t> below_pages;
  for (uint32_t i = 0; i < pages.size(); ++i) {
    if (!pages[i].empty()) continue;
    rest.keys.push_back(request.keys[i]);
    below_pages.push_back(i);
  }
  if (rest.keys.empty()) {
    done(JoinLeases(request, std::move(pages), {}, {}));
    return NoteUse(request.keyspace, std::move(request.keys));
  }
  AcquireBelow(std::move(rest), [this, request = std::move(request), pages = std::move(pages),
                                 below_pages = std::move(below_pages), done = std::move(done)](
                                    absl::StatusOr<AcquireResult> below) mutable {
    if (!below.ok()) {
      devices_.Unref(pages);
      return done(below.status());
    }
    AcquireResult result =
        JoinLeases(request, std::move(pages), std::move(below_pages), *std::move(below));
    request.keys.resize(result.hit_pages);
    done(std::move(result));
    NoteUse(request.keyspace, std::move(request.keys));
  });
}

// The prefix ends at the first page that is neither on a device nor was found below.
AcquireResult ThreeTierStore::JoinLeases(const AcquireRequest& request,
                                         std::vector<DeviceTier::PlacesOf> pages,
                                         std::vector<uint32_t> below_pages, AcquireResult below) {
  const size_t hits =
      below.hit_pages < below_pages.size() ? below_pages[below.hit_pages] : pages.size();
  devices_.Unref(std::span(pages).subspan(hits));
  pages.resize(hits);
  below_pages.resize(below.hit_pages);
  AcquireResult result;
  result.hit_pages = static_cast<uint32_t>(hits);
  result.miss_reason = below.miss_reason;
  if (hits == 0) return result;
  result.page_tiers.assign(hits, Tier::kDevice);
  for (uint32_t i = 0; i < below.hit_pages; ++i) {
    result.page_tiers[below_pages[i]] = below.page_tiers[i];
  }
  for (FragmentRef& fragment : below.fragments) fragment.page = below_pages[fragment.page];
  result.fragments = std::move(below.fragments);
  const size_t fragments_max =
      request.fragments_max - std::min(request.fragments_max, result.fragments.size());
  const DeviceTier::Leased leased =
      devices_.Lease(request, std::move(pages), below.lease, std::move(below_pages), fragments_max,
                     &result.device_fragments);
  if (leased.pages < hits) CutPrefix(leased.pages, &result);
  if (leased.lease == 0 && below.lease != 0) host_->Release(below.lease);
  result.lease = leased.lease;
  return result;
}

std::optional<LeasedPages> ThreeTierStore::ReadLease(LeaseId lease, const TileRange& range) const {
  if (!DeviceTier::IsOwnLease(lease)) return host_->ReadLease(lease, range);
  std::optional<DeviceTier::LeaseView> view = devices_.ReadLease(lease, range);
  if (!view) return std::nullopt;
  LeasedPages read = {.pages = view->pages, .fragments = {}};
  read.device_fragments = std::move(view->fragments);
  if (view->below == 0) return read;
  std::optional<LeasedPages> below = host_->ReadLease(view->below, range);
  if (!below) return std::nullopt;
  for (FragmentRef& fragment : below->fragments) {
    fragment.page = view->below_pages[fragment.page];
  }
  read.fragments = std::move(below->fragments);
  CutFragments(read.pages, &read.fragments);
  return read;
}

bool ThreeTierStore::Release(LeaseId lease) {
  if (!DeviceTier::IsOwnLease(lease)) return host_->Release(lease);
  const std::optional<LeaseId> below = devices_.Release(lease);
  if (below && *below != 0) host_->Release(*below);
  return below.has_value();
}

void ThreeTierStore::AcquireBelow(AcquireRequest request,
                                  std::function<void(absl::StatusOr<AcquireResult>)> done) {
  MissReason reason;
  std::vector<PageHandle> pages = host_->RefPrefix(request, 0, request.keys.size(), &reason);
  if (pages.size() < request.keys.size()) {
    const KeyspaceId keyspace = request.keyspace;
    auto answer = [this, keyspace, keys = request.keys,
                   done = std::move(done)](absl::StatusOr<AcquireResult> result) mutable {
      keys.resize(result.ok() ? result->hit_pages : 0);
      done(std::move(result));
      NoteUse(keyspace, std::move(keys));
    };
    const AcquireContext context = {*host_, *below_, *promoter_, timer_, pending_, clock_};
    std::make_shared<AcquireOperation>(context, std::move(request), std::move(pages), reason,
                                       std::move(answer))
        ->Start();
    return;
  }
  std::vector<Tier> tiers(pages.size(), Tier::kHost);
  done(LeasePrefix(*host_, request, std::move(pages), std::move(tiers), reason));
  NoteUse(request.keyspace, std::move(request.keys));
}

// Records the use in both tiers after the answer, so that the SSD tier does not evict a page as
// unused that is read from host memory.
void ThreeTierStore::NoteUse(const KeyspaceId& keyspace, std::vector<PageKey> keys) {
  if (keys.empty()) return;
  recency_.Submit([this, keyspace, keys = std::move(keys)] {
    devices_.Touch(keyspace, keys);
    host_->Touch(keyspace, keys);
    if (has_below()) TouchBelow(keyspace, keys);
  });
}

void ThreeTierStore::TouchBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  below_->Touch(keyspace, keys);
  if (only_hit()) {
    const WriteThrough::Queueing queueing(*writer_);
    writer_->Enqueue(host_->RefAbsentBelow(keyspace, keys));
  }
  const TimePoint now = clock_.Now();
  if (now - recency_synced_ < kRecencySyncInterval) return;
  recency_synced_ = now;
  below_->Sync().IgnoreError();  // only the order of use; the tier reports its own state
}

LookupResult ThreeTierStore::Lookup(const AcquireRequest& request) {
  LookupResult result;
  const std::vector<bool> on_device = devices_.Covered(request);
  size_t index = 0;
  while (index < request.keys.size()) {
    if (on_device[index]) {
      result.page_tiers.push_back(Tier::kDevice);
      ++index;
      continue;
    }
    const auto next =
        std::find(on_device.begin() + static_cast<std::ptrdiff_t>(index), on_device.end(), true);
    const size_t in_host =
        host_->CountPrefix(request, index, static_cast<size_t>(next - on_device.begin()));
    result.page_tiers.insert(result.page_tiers.end(), in_host, Tier::kHost);
    index += in_host;
    if (index == request.keys.size()) break;
    if (on_device[index]) continue;
    const PageKey& key = request.keys[index];
    const auto below = below_->Find(request.keyspace, key);
    const auto present = host_->Present(request.keyspace, key, request.generation);
    if (Covers(present, request.range)) continue;  // it came meanwhile
    if (FragmentsToLoad(below, present, request.range, request.generation).empty()) {
      const bool stale = !below.empty() && below[0].generation < request.generation;
      result.miss_reason = stale                                 ? MissReason::kGeneration
                           : !below.empty() || !present.empty()  ? MissReason::kNotCovered
                           : pending_.Has(request.keyspace, key) ? MissReason::kPending
                                                                 : MissReason::kAbsent;
      break;
    }
    result.page_tiers.push_back(Tier::kSsd);
    ++index;
  }
  result.hit_pages = static_cast<uint32_t>(index);
  return result;
}

}  // namespace crumb::storage
