// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/tiered_store.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "common/executor.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/absent_tier.h"
#include "storage/acquire_operation.h"
#include "storage/coverage.h"
#include "storage/device_tier.h"
#include "storage/incoming_fragment.h"
#include "storage/open_tiered_store.h"
#include "storage/ssd/ssd_tier.h"

namespace crumb::storage {
namespace {

// Queued fragments keep their slots; this part of host memory may wait so, the rest can be evicted.
constexpr uint64_t kQueuedShare = 4;
// Accesses whose recency waits to be noted below; more are forgotten.
constexpr size_t kRecencyQueueMax = 256;
// How far behind the durable recency may be while pages are read.
constexpr Duration kRecencySyncInterval = std::chrono::seconds(5);

absl::Status Stopped() { return absl::UnavailableError("the store is stopping"); }

FragmentMeta MetaOf(const FragmentHeader& header, const TileRange& range,
                    uint32_t logical_tile_bytes) {
  return {
      .keyspace = header.keyspace,
      .key = header.key,
      .parent = header.parent,
      .generation = header.generation,
      .range = range,
      .tiles_bytes = static_cast<uint32_t>(FragmentTilesBytes(range.tiles(), header.tile_bytes)),
      .bytes = static_cast<uint32_t>(FragmentBytes(range.tiles(), header.tile_bytes)),
      .logical_tile_bytes = logical_tile_bytes};
}

// A slot of host memory until it is published.
class HostIncomingSlot final : public IncomingSlot {
 public:
  HostIncomingSlot(HostTier& host, const Slot& slot, uint64_t bytes)
      : host_(host), bytes_(bytes), slot_(slot) {}
  ~HostIncomingSlot() override {
    if (!taken_) host_.Abandon(slot_);
  }
  std::span<std::byte> memory() override { return host_.Memory(slot_).first(bytes_); }
  Slot Take() {
    taken_ = true;
    return slot_;
  }

 private:
  HostTier& host_;
  const uint64_t bytes_;
  const Slot slot_;
  bool taken_ = false;
};

class TieredStoreImpl final : public TieredStore {
 public:
  TieredStoreImpl(const StoreOptions& options, const Clock& clock, StoreEvents events)
      : options_(options),
        clock_(clock),
        events_(std::move(events)),
        pending_(clock, options.pending_for, static_cast<size_t>(options.pending_pages_max)),
        timer_(clock),
        devices_(DeviceTierOptions(), clock, DeviceEvents()),
        recency_({.name = "crumb-recency", .threads = 1, .queue_max = kRecencyQueueMax}) {}
  ~TieredStoreImpl() override { Stop(Duration::zero()).IgnoreError(); }

  absl::Status Start(const OpenFragmentTier& open_below, StoreStart start);

  absl::StatusOr<CommitOutcome> Commit(const CommitRequest& request) override;
  absl::StatusOr<std::shared_ptr<IncomingSlot>> ReserveIncoming(const KeyspaceId& keyspace,
                                                                uint64_t bytes) override;
  absl::StatusOr<CommitOutcome> PublishIncoming(const std::shared_ptr<IncomingSlot>& slot,
                                                const FragmentHeader& header,
                                                uint32_t logical_tile_bytes,
                                                Received received) override;
  void Acquire(AcquireRequest request,
               std::function<void(absl::StatusOr<AcquireResult>)> done) override;
  LookupResult Lookup(const AcquireRequest& request) override;
  std::optional<LeasedPages> ReadLease(LeaseId lease, const TileRange& range) const override;
  bool Release(LeaseId lease) override;
  std::span<const std::byte> Bytes(const FragmentRef& fragment) const override {
    return host_->Bytes(fragment);
  }
  void Flush(std::function<void(absl::StatusOr<uint64_t>)> done) override;
  void SetPending(const KeyspaceId& keyspace, std::span<const PageKey> keys) override {
    pending_.Set(keyspace, keys);
  }
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) override;
  uint32_t Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) override {
    return Pin(keyspace, keys, TimePoint::min());
  }
  uint32_t Delete(const KeyspaceId& keyspace, std::span<const PageKey> keys) override;
  uint64_t DropKeyspace(const KeyspaceId& keyspace, uint64_t generation) override;
  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    return below_->PutRecord(name, value);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() override {
    return below_->Records();
  }
  std::optional<PageKey> ParentOf(const KeyspaceId& keyspace, const PageKey& key) const override;
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&, Tier)>& visit) override;
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override {
    return host_->KeyspaceBytes(keyspace) + below_->KeyspaceBytes(keyspace);
  }
  std::vector<Slab> slabs() const override { return host_->slabs(); }
  absl::Status SetTenant(const KeyspaceId& keyspace, const std::string& tenant) override {
    return host_->SetTenant(keyspace, tenant);
  }
  absl::StatusOr<UniqueFd> OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const override {
    return host_->OpenSlab(slab, keyspace);
  }
  absl::StatusOr<uint64_t> GrowHost(uint64_t bytes) override { return host_->Grow(bytes); }
  DeviceTier* devices() override { return &devices_; }
  StoreStats Stats() const override;
  absl::Status Stop(Duration grace) override;
  absl::StatusOr<HandedOverMemory> HandOver() override;

 private:
  absl::Status OpenHost(StoreStart start);
  // How a fragment that is handed over stands with the tier below; none: it was dropped.
  std::optional<Below> BelowOf(const FragmentMeta& meta) const;
  bool has_below() const { return !options_.ssd.path.empty(); }
  bool only_hit() const { return options_.ssd.admission == "second_hit"; }
  void Announce(const KeyspaceId& keyspace, const PageKey& key, Tier tier,
                PageEvent::Kind kind) const;
  FragmentTierEvents EventsOf(Tier tier) const;
  DeviceTier::Options DeviceTierOptions() const;
  FragmentTierEvents DeviceEvents() const { return EventsOf(Tier::kDevice); }
  FragmentTierEvents BelowEvents();
  std::vector<TileRange> Present(const FragmentHeader& header) const;
  absl::Status CommitPiece(const FragmentHeader& header, const CommitRequest& request,
                           const TileRange& piece);
  absl::StatusOr<Slot> ReserveSlot(const KeyspaceId& keyspace, uint64_t bytes);
  absl::Status Publish(const FragmentMeta& meta, const Slot& slot, bool write_now);
  void AcquireBelow(AcquireRequest request,
                    std::function<void(absl::StatusOr<AcquireResult>)> done);
  // Answers what is on devices, `pages`, together with what the tiers below answer for the rest.
  void AcquireBeside(AcquireRequest request, std::vector<DeviceTier::PlacesOf> pages,
                     std::function<void(absl::StatusOr<AcquireResult>)> done);
  AcquireResult JoinLeases(const AcquireRequest& request, std::vector<DeviceTier::PlacesOf> pages,
                           std::vector<uint32_t> below_pages, AcquireResult below);
  void NoteUse(const KeyspaceId& keyspace, std::vector<PageKey> keys);
  void TouchBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  const StoreOptions options_;
  const Clock& clock_;
  const StoreEvents events_;
  std::unique_ptr<FragmentTier> below_;
  std::unique_ptr<HostTier> host_;
  PendingHints pending_;
  DeadlineTimer timer_;
  DeviceTier devices_;
  std::unique_ptr<Executor> readers_;
  std::unique_ptr<WriteThrough> writer_;
  std::unique_ptr<Promoter> promoter_;
  Executor recency_;
  std::atomic<bool> stopped_ = false;
  std::atomic<bool> host_ready_ = false;
  TimePoint recency_synced_;  // recency_'s thread only
  Counter dedup_bytes_;
  Counter admission_rejected_;
  Counter verify_failures_;
  Counter demoted_;
};

absl::Status TieredStoreImpl::Start(const OpenFragmentTier& open_below, StoreStart start) {
  CRUMB_ASSIGN_OR_RETURN(below_, open_below(BelowEvents()));
  CRUMB_RETURN_IF_ERROR(OpenHost(std::move(start)));
  host_ready_ = true;
  readers_ = std::make_unique<Executor>(
      Executor::Options{.name = "crumb-ssd-read",
                        .threads = has_below() ? static_cast<int>(options_.ssd.io_threads) : 0,
                        .queue_max = static_cast<size_t>(options_.ssd.read_queue_pages_max)});
  writer_ = std::make_unique<WriteThrough>(
      WriteThrough::Options{.pages_max = static_cast<size_t>(options_.ssd.write_queue_pages_max),
                            .bytes_max = has_below() ? host_->capacity_bytes() / kQueuedShare : 0,
                            .flush_only_hit = only_hit()},
      *host_, *below_, [this](const KeyspaceId& keyspace, const PageKey& key) {
        if (events_.durable) events_.durable(keyspace, key);
      });
  promoter_ = std::make_unique<Promoter>(*host_, *below_, *writer_, *readers_);
  // What the process before had queued and not written.
  if (has_below() && !only_hit()) {
    writer_->Enqueue(host_->RefAbsentBelow(static_cast<size_t>(options_.ssd.write_queue_pages_max),
                                           /*only_hit=*/false));
  }
  return absl::OkStatus();
}

absl::Status TieredStoreImpl::OpenHost(StoreStart start) {
  HostTier::Options options = {.host = options_.host,
                               .demote_only_hit = only_hit(),
                               .first_bytes = start.host_bytes,
                               .slab_gone = events_.slab_gone};
  if (start.handed_over != nullptr) {
    LimitToHandedOver(*start.handed_over, &options);
    for (const auto& [name, value] : start.handed_over->image.records) {
      if (!has_below()) CRUMB_RETURN_IF_ERROR(below_->PutRecord(name, value));
    }
  }
  CRUMB_ASSIGN_OR_RETURN(host_, HostTier::Open(options, clock_, EventsOf(Tier::kHost)));
  if (start.handed_over == nullptr) return absl::OkStatus();
  const HostTier::Adopted adopted = host_->Adopt(
      std::move(*start.handed_over), [this](const FragmentMeta& meta) { return BelowOf(meta); });
  LogInfo("host tier: {} pages taken over, {} left out", adopted.pages, adopted.left_out);
  return absl::OkStatus();
}

std::optional<Below> TieredStoreImpl::BelowOf(const FragmentMeta& meta) const {
  if (!has_below()) return Below::kRefused;
  if (meta.generation < below_->GenerationOf(meta.keyspace)) return std::nullopt;
  for (const FragmentMeta& there : below_->Find(meta.keyspace, meta.key)) {
    if (there.range == meta.range && there.generation == meta.generation) return Below::kStored;
  }
  return Below::kAbsent;
}

absl::StatusOr<HandedOverMemory> TieredStoreImpl::HandOver() {
  CRUMB_ASSIGN_OR_RETURN(HandedOverMemory memory, host_->HandOver());
  if (!has_below()) {
    CRUMB_ASSIGN_OR_RETURN(memory.image.records, below_->Records());
  }
  return memory;
}

void TieredStoreImpl::Announce(const KeyspaceId& keyspace, const PageKey& key, Tier tier,
                               PageEvent::Kind kind) const {
  if (events_.page) events_.page({kind, keyspace, key, tier});
}

DeviceTier::Options TieredStoreImpl::DeviceTierOptions() const {
  return {.device = options_.device, .is_below = [this](const FragmentMeta& fragment) {
            std::vector<TileRange> present =
                host_->Present(fragment.keyspace, fragment.key, fragment.generation);
            for (const FragmentMeta& there : below_->Find(fragment.keyspace, fragment.key)) {
              const bool known =
                  std::any_of(present.begin(), present.end(),
                              [&](const TileRange& range) { return Overlaps(range, there.range); });
              if (!known && there.generation >= fragment.generation) present.push_back(there.range);
            }
            return Covers(present, fragment.range);
          }};
}

FragmentTierEvents TieredStoreImpl::EventsOf(Tier tier) const {
  const auto announce = [this, tier](PageEvent::Kind kind) {
    return [this, tier, kind](const KeyspaceId& keyspace, const PageKey& key) {
      Announce(keyspace, key, tier, kind);
    };
  };
  return {.added = announce(PageEvent::Kind::kAdded),
          .removed = announce(PageEvent::Kind::kRemoved)};
}

FragmentTierEvents TieredStoreImpl::BelowEvents() {
  return {.added =
              [this](const KeyspaceId& keyspace, const PageKey& key) {
                Announce(keyspace, key, Tier::kSsd, PageEvent::Kind::kAdded);
              },
          .removed =
              [this](const KeyspaceId& keyspace, const PageKey& key) {
                if (host_ready_) host_->ForgetBelow(keyspace, key);
                Announce(keyspace, key, Tier::kSsd, PageEvent::Kind::kRemoved);
              }};
}

std::vector<TileRange> TieredStoreImpl::Present(const FragmentHeader& header) const {
  std::vector<TileRange> present = host_->Present(header.keyspace, header.key, header.generation);
  for (const FragmentMeta& fragment : below_->Find(header.keyspace, header.key)) {
    if (fragment.generation >= header.generation) present.push_back(fragment.range);
  }
  return present;
}

absl::StatusOr<CommitOutcome> TieredStoreImpl::Commit(const CommitRequest& request) {
  if (stopped_) return Stopped();
  absl::StatusOr<FragmentHeader> header = ReadCommitHeader(request);
  if (!header.ok()) {
    if (absl::IsDataLoss(header.status())) verify_failures_.Add();
    return header.status();
  }
  if (header->generation < below_->GenerationOf(header->keyspace)) {
    return absl::InvalidArgumentError("the fragment's generation was dropped");
  }
  int stored_tiles = 0;
  for (const TileRange& piece : Subtract(header->range, Present(*header))) {
    const absl::Status status = CommitPiece(*header, request, piece);
    if (status.ok()) {
      stored_tiles += piece.tiles();
    } else if (absl::IsAborted(status)) {
      return absl::InvalidArgumentError("the fragment's generation was dropped");
    } else if (!absl::IsAlreadyExists(status)) {
      return status;
    }
  }
  const int known_tiles = header->range.tiles() - stored_tiles;
  dedup_bytes_.Add(static_cast<uint64_t>(known_tiles) * header->tile_bytes);
  return stored_tiles > 0 ? CommitOutcome::kStored : CommitOutcome::kDeduplicated;
}

absl::Status TieredStoreImpl::CommitPiece(const FragmentHeader& header,
                                          const CommitRequest& request, const TileRange& piece) {
  const FragmentMeta meta = MetaOf(header, piece, request.logical_tile_bytes);
  CRUMB_ASSIGN_OR_RETURN(const Slot slot, ReserveSlot(meta.keyspace, meta.bytes));
  absl::Status copied =
      CopyFragment(header, request.fragment, piece, host_->Memory(slot).first(meta.bytes));
  if (!copied.ok()) {
    verify_failures_.Add();
    host_->Abandon(slot);
    return copied;
  }
  const bool write_now = has_below() && !only_hit();
  if (!write_now && has_below()) admission_rejected_.Add();
  return Publish(meta, slot, write_now);
}

absl::StatusOr<Slot> TieredStoreImpl::ReserveSlot(const KeyspaceId& keyspace, uint64_t bytes) {
  std::vector<Departure> departures;
  absl::StatusOr<Slot> slot =
      host_->Reserve(keyspace, bytes, has_below() ? writer_->room_bytes() : 0, &departures);
  demoted_.Add(departures.size());
  writer_->Enqueue(departures);
  return slot;
}

// Takes the slot, whatever comes of it.
absl::Status TieredStoreImpl::Publish(const FragmentMeta& meta, const Slot& slot, bool write_now) {
  CRUMB_ASSIGN_OR_RETURN(const PageHandle page, host_->Publish(meta, slot,
                                                               write_now     ? Below::kQueued
                                                               : has_below() ? Below::kAbsent
                                                                             : Below::kRefused));
  if (write_now) {
    writer_->Enqueue(std::vector<Departure>{{page, meta}});
  } else {
    host_->Unref(std::span(&page, 1));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<IncomingSlot>> TieredStoreImpl::ReserveIncoming(
    const KeyspaceId& keyspace, uint64_t bytes) {
  if (stopped_) return Stopped();
  CRUMB_ASSIGN_OR_RETURN(const Slot slot, ReserveSlot(keyspace, bytes));
  return std::make_shared<HostIncomingSlot>(*host_, slot, bytes);
}

absl::StatusOr<CommitOutcome> TieredStoreImpl::PublishIncoming(
    const std::shared_ptr<IncomingSlot>& slot, const FragmentHeader& header,
    uint32_t logical_tile_bytes, Received received) {
  if (stopped_) return Stopped();
  auto& incoming = static_cast<HostIncomingSlot&>(*slot);
  const FragmentMeta meta = MetaOf(header, header.range, logical_tile_bytes);
  if (meta.bytes != slot->memory().size()) {
    return absl::InvalidArgumentError("the fragment's size differs from its slot's");
  }
  if (header.generation < below_->GenerationOf(header.keyspace)) {
    return absl::InvalidArgumentError("the fragment's generation was dropped");
  }
  EncodeFragmentHeader(header, slot->memory().subspan(meta.tiles_bytes));
  const std::vector<TileRange> present = Present(header);
  if (Covers(present, header.range)) return CommitOutcome::kDeduplicated;
  const bool overlaps = std::any_of(present.begin(), present.end(), [&](const TileRange& there) {
    return Overlaps(there, header.range);
  });
  if (overlaps) {  // only the tiles that are missing, as pieces of their own
    CommitRequest request;
    request.keyspace = header.keyspace;
    request.generation = header.generation;
    request.fragment = slot->memory();
    request.tiles_bytes = meta.tiles_bytes;
    request.logical_tile_bytes = logical_tile_bytes;
    return Commit(request);
  }
  const bool write_now = received == Received::kHome && has_below() && !only_hit();
  const absl::Status published = Publish(meta, incoming.Take(), write_now);
  if (published.ok()) return CommitOutcome::kStored;
  if (absl::IsAlreadyExists(published)) return CommitOutcome::kDeduplicated;
  if (absl::IsAborted(published)) {
    return absl::InvalidArgumentError("the fragment's generation was dropped");
  }
  return published;
}

void TieredStoreImpl::Acquire(AcquireRequest request,
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

void TieredStoreImpl::AcquireBeside(AcquireRequest request, std::vector<DeviceTier::PlacesOf> pages,
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
AcquireResult TieredStoreImpl::JoinLeases(const AcquireRequest& request,
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
  result.lease = devices_.Lease(request, std::move(pages), below.lease, std::move(below_pages),
                                &result.device_fragments);
  return result;
}

std::optional<LeasedPages> TieredStoreImpl::ReadLease(LeaseId lease, const TileRange& range) const {
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
  return read;
}

bool TieredStoreImpl::Release(LeaseId lease) {
  if (!DeviceTier::IsOwnLease(lease)) return host_->Release(lease);
  const std::optional<LeaseId> below = devices_.Release(lease);
  if (below && *below != 0) host_->Release(*below);
  return below.has_value();
}

void TieredStoreImpl::AcquireBelow(AcquireRequest request,
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

// Both tiers hear of a use behind the answer: a page that is read from host memory must stay young
// below, too.
void TieredStoreImpl::NoteUse(const KeyspaceId& keyspace, std::vector<PageKey> keys) {
  if (keys.empty()) return;
  recency_.Submit([this, keyspace, keys = std::move(keys)] {
    devices_.Touch(keyspace, keys);
    host_->Touch(keyspace, keys);
    if (has_below()) TouchBelow(keyspace, keys);
  });
}

void TieredStoreImpl::TouchBelow(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  below_->Touch(keyspace, keys);
  if (only_hit()) writer_->Enqueue(host_->RefAbsentBelow(keyspace, keys));
  const TimePoint now = clock_.Now();
  if (now - recency_synced_ < kRecencySyncInterval) return;
  recency_synced_ = now;
  below_->Sync().IgnoreError();  // the tier reports its own state
}

LookupResult TieredStoreImpl::Lookup(const AcquireRequest& request) {
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

void TieredStoreImpl::Flush(std::function<void(absl::StatusOr<uint64_t>)> done) {
  if (!has_below()) return done(uint64_t{0});
  writer_->Flush([this, done = std::move(done)](const absl::Status& status) {
    if (!status.ok()) return done(status);
    StoreStats stats;
    below_->AddStats(stats);
    done(stats.ssd.pages);
  });
}

uint32_t TieredStoreImpl::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                              TimePoint until) {
  uint32_t pinned = 0;
  for (const PageKey& key : keys) {
    const std::span<const PageKey> one(&key, 1);
    const uint32_t above =
        std::max(devices_.Pin(keyspace, one, until), host_->Pin(keyspace, one, until));
    pinned += std::max(above, below_->Pin(keyspace, one, until));
  }
  return pinned;
}

// Devices and host memory first, then whatever is on its way down, then below, then what was on its
// way up.
uint32_t TieredStoreImpl::Delete(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  std::vector<PageKey> removed = devices_.Remove(keyspace, keys);
  const std::vector<PageKey> in_host = host_->Remove(keyspace, keys);
  removed.insert(removed.end(), in_host.begin(), in_host.end());
  writer_->WaitFor(keyspace, keys);
  std::sort(removed.begin(), removed.end());
  removed.erase(std::unique(removed.begin(), removed.end()), removed.end());
  uint32_t only_below = 0;
  for (const PageKey& key : keys) {
    const bool was_above = std::binary_search(removed.begin(), removed.end(), key);
    if (!was_above && !below_->Find(keyspace, key).empty()) ++only_below;
  }
  below_->Remove(keyspace, keys);
  promoter_->WaitFor(keyspace, keys);
  host_->Remove(keyspace, keys);
  return static_cast<uint32_t>(removed.size()) + only_below;
}

uint64_t TieredStoreImpl::DropKeyspace(const KeyspaceId& keyspace, uint64_t generation) {
  std::vector<PageKey> removed = devices_.Drop(keyspace, generation);
  const std::vector<PageKey> in_host = host_->Drop(keyspace, generation);
  removed.insert(removed.end(), in_host.begin(), in_host.end());
  std::sort(removed.begin(), removed.end());
  removed.erase(std::unique(removed.begin(), removed.end()), removed.end());
  uint64_t only_above = 0;
  for (const PageKey& key : removed) {
    if (below_->Find(keyspace, key).empty()) ++only_above;
  }
  return only_above + below_->Drop(keyspace, generation);
}

std::optional<PageKey> TieredStoreImpl::ParentOf(const KeyspaceId& keyspace,
                                                 const PageKey& key) const {
  if (const auto parent = host_->ParentOf(keyspace, key)) return parent;
  if (const auto parent = devices_.ParentOf(keyspace, key)) return parent;
  const std::vector<FragmentMeta> below = below_->Find(keyspace, key);
  if (below.empty()) return std::nullopt;
  return below.front().parent;
}

void TieredStoreImpl::ForEachPage(const KeyspaceId& keyspace,
                                  const std::function<void(const PageKey&, Tier)>& visit) {
  devices_.ForEachPage(keyspace, [&](const PageKey& key) { visit(key, Tier::kDevice); });
  host_->ForEachPage(keyspace, [&](const PageKey& key) { visit(key, Tier::kHost); });
  below_->ForEachPage(keyspace, [&](const PageKey& key) { visit(key, Tier::kSsd); });
}

StoreStats TieredStoreImpl::Stats() const {
  StoreStats stats;
  below_->AddStats(stats);
  stats.host = host_->Stats();
  host_->AddLeaseStats(stats);
  devices_.AddStats(stats);  // behind the other leases
  stats.durable_pages = writer_->durable_pages();
  stats.dedup_bytes = dedup_bytes_.value();
  stats.write_queue_pages = writer_->queued();
  stats.write_queue_dropped = writer_->dropped();
  stats.admission_rejected = admission_rejected_.value();
  stats.promoted_pages = promoter_->promoted();
  stats.demoted_pages = demoted_.value();
  stats.verify_failures_commit = verify_failures_.value();
  return stats;
}

absl::Status TieredStoreImpl::Stop(Duration grace) {
  if (stopped_.exchange(true) || promoter_ == nullptr) return absl::OkStatus();
  readers_->Stop();
  recency_.Stop();
  writer_->Stop(std::chrono::steady_clock::now() + grace);
  return below_->Sync();
}

}  // namespace

absl::StatusOr<std::unique_ptr<TieredStore>> OpenTieredStore(const StoreOptions& options,
                                                             Clock& clock, StoreEvents events,
                                                             const OpenFragmentTier& open_below,
                                                             StoreStart start) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  auto store = std::make_unique<TieredStoreImpl>(options, clock, std::move(events));
  CRUMB_RETURN_IF_ERROR(store->Start(open_below, std::move(start)));
  return store;
}

absl::StatusOr<std::unique_ptr<TieredStore>> TieredStore::Open(const StoreOptions& options,
                                                               Clock& clock, StoreEvents events,
                                                               StoreStart start) {
  const auto open_below = [&](FragmentTierEvents tier_events) {
    return options.ssd.path.empty() ? MakeAbsentTier()
                                    : SsdTier::Open(options.ssd, clock, std::move(tier_events));
  };
  return OpenTieredStore(options, clock, std::move(events), open_below, std::move(start));
}

}  // namespace crumb::storage
