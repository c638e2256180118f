// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "storage/coverage.h"
#include "storage/store/acquire_operation.h"
#include "storage/store/three_tier_store.h"

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

}  // namespace

void ThreeTierStore::Acquire(AcquireRequest request,
                             std::function<void(absl::StatusOr<AcquireResult>)> done) {
  if (stopped_) return done(Stopped());
  Search search = {
      .request = std::move(request), .on_device = {}, .below_index = {}, .done = std::move(done)};
  std::optional<AcquireRequest> below;
  if (!search.request.pools.empty()) below = RefOnDevices(&search);
  const AcquireRequest& wanted = below ? *below : search.request;
  FoundPages found;
  found.pages = host_->RefPrefix(wanted, 0, wanted.keys.size(), &found.reason);
  found.part_full = found.reason == MissReason::kBusy;
  if (found.pages.size() == wanted.keys.size() || found.part_full) {
    found.tiers.assign(found.pages.size(), Tier::kHost);
    return Grant(std::move(search), std::move(found));
  }
  const AcquireContext context = {*host_, *below_, *promoter_, timer_, pending_, clock_};
  if (!below) below = search.request;
  std::make_shared<AcquireOperation>(context, *std::move(below), std::move(found.pages),
                                     found.reason,
                                     [this, search = std::move(search)](FoundPages pages) mutable {
                                       Grant(std::move(search), std::move(pages));
                                     })
      ->Start();
}

std::optional<AcquireRequest> ThreeTierStore::RefOnDevices(Search* search) {
  const AcquireRequest& request = search->request;
  std::vector<DeviceTier::PlacesOf> on_device = devices_.Ref(request);
  const bool any = std::any_of(on_device.begin(), on_device.end(),
                               [](const auto& places) { return !places.empty(); });
  if (!any) return std::nullopt;
  AcquireRequest below = {.keyspace = request.keyspace,
                          .generation = request.generation,
                          .keys = {},
                          .range = request.range,
                          .deadline = request.deadline,
                          .within_part = request.within_part};
  for (uint32_t i = 0; i < on_device.size(); ++i) {
    if (!on_device[i].empty()) continue;
    search->below_index.push_back(i);
    below.keys.push_back(request.keys[i]);
  }
  search->on_device = std::move(on_device);
  return below;
}

void ThreeTierStore::Grant(Search&& search, FoundPages&& found) {
  AcquireResult result;
  result.miss_reason = found.reason;
  result.part_full = found.part_full;
  const size_t pages_found = found.pages.size();
  const TimePoint now = clock_.Now();
  bool lacking =
      host_->NameFragments(search.request, found.tiers, now, &found.pages, &result.fragments);
  if (found.pages.size() < pages_found) result.miss_reason = MissReason::kBusy;
  if (search.on_device.empty()) {
    found.tiers.resize(found.pages.size());
    result.page_tiers = std::move(found.tiers);
  } else {
    JoinDevices(search, found, &result);
  }
  const size_t hits = result.page_tiers.size();
  if (!search.on_device.empty()) {  // a page may be on a device and in host memory
    lacking |= host_->Admit(search.request.keyspace, std::span(search.request.keys).first(hits));
  }
  result.hit_pages = static_cast<uint32_t>(hits);
  if (hits > 0) {
    result.lease = leases_->Add({.host = std::move(found.pages),
                                 .host_index = std::move(search.below_index),
                                 .device = std::move(search.on_device),
                                 .host_fragments = result.fragments.size()},
                                now);
  }
  search.done(std::move(result));
  search.request.keys.resize(hits);
  if (lacking) QueueAdmitted(search.request.keyspace, search.request.keys);
  NoteUse(search.request.keyspace, std::move(search.request.keys));
}

void ThreeTierStore::JoinDevices(Search& search, FoundPages& found, AcquireResult* result) {
  std::vector<uint32_t>& index = search.below_index;
  for (FragmentRef& fragment : result->fragments) fragment.page = index[fragment.page];
  const size_t hits =
      found.pages.size() < index.size() ? index[found.pages.size()] : search.on_device.size();
  devices_.Unref(std::span(search.on_device).subspan(hits));
  search.on_device.resize(hits);
  const size_t fragments_max = search.request.fragments_max -
                               std::min(search.request.fragments_max, result->fragments.size());
  devices_.NameFragments(search.request, fragments_max, &search.on_device,
                         &result->device_fragments);
  const size_t named = search.on_device.size();
  if (named < hits) result->miss_reason = MissReason::kBusy;
  index.resize(found.pages.size());
  const auto kept =
      static_cast<size_t>(std::lower_bound(index.begin(), index.end(), named) - index.begin());
  host_->Unref(std::span(found.pages).subspan(kept));
  found.pages.resize(kept);
  index.resize(kept);
  CutFragments(named, &result->fragments);
  result->page_tiers.assign(named, Tier::kDevice);
  for (size_t i = 0; i < kept; ++i) result->page_tiers[index[i]] = found.tiers[i];
}

// Runs after the response, so that callers do not wait for it. A fragment for which the queue has
// no room is written when it leaves host memory or by a Flush, because it is admitted and owed
// already.
void ThreeTierStore::QueueAdmitted(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  const WriteThrough::Queueing queueing(*writer_);
  writer_->Enqueue(host_->RefAbsentBelow(keyspace, keys));
}

// Records the use in both tiers after the response, so that the SSD tier does not evict a page as
// unused that is read from host memory.
void ThreeTierStore::NoteUse(const KeyspaceId& keyspace, std::vector<PageKey> keys) {
  if (keys.empty()) return;
  recency_->Submit(host_->TenantOf(keyspace), [this, keyspace, keys = std::move(keys)] {
    devices_.Touch(keyspace, keys);
    host_->Touch(keyspace, keys);
    if (has_below()) TouchBelow(keyspace, keys);
  });
}

void ThreeTierStore::TouchBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  below_->Touch(keyspace, keys);
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
