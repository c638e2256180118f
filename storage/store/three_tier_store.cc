// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/three_tier_store.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/coverage.h"
#include "storage/host/host_succession.h"
#include "storage/store/incoming_fragment.h"

namespace crumb::storage {
namespace {

// Queued fragments keep their slots; this part of host memory may wait so, the rest can be evicted.
constexpr uint64_t kQueuedFraction = 4;
// How often a commit looks for the tiles that are missing: each time but the first, another commit
// has brought tiles of the same page between the look and the insertion.
constexpr int kCommitAttemptsMax = 16;
// Accesses whose recency waits to be noted below; more are forgotten.
constexpr size_t kRecencyQueueMax = 256;

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

uint64_t BytesOf(const std::vector<FragmentMeta>& fragments) {
  uint64_t sum = 0;
  for (const FragmentMeta& fragment : fragments) sum += fragment.bytes;
  return sum;
}

// Nanoseconds of the wall clock: higher than all marks of the processes before, which lost less
// than a page in each.
uint64_t MarkBase() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

// A slot of host memory until it is published.
class HostIncomingSlot final : public IncomingSlot {
 public:
  HostIncomingSlot(HostRoom& room, const Slot& slot, uint64_t bytes)
      : room_(room), bytes_(bytes), slot_(slot) {}
  ~HostIncomingSlot() override {
    if (!taken_) room_.Abandon(slot_);
  }
  std::span<std::byte> memory() override { return room_.Memory(slot_).first(bytes_); }
  Slot Take() {
    taken_ = true;
    return slot_;
  }

 private:
  HostRoom& room_;
  const uint64_t bytes_;
  const Slot slot_;
  bool taken_ = false;
};

}  // namespace

ThreeTierStore::ThreeTierStore(const StoreOptions& options, const Clock& clock, StoreEvents events,
                               DeletionEpochs epochs)
    : options_(options),
      clock_(clock),
      events_(std::move(events)),
      pending_(clock, options.pending_for, static_cast<size_t>(options.pending_pages_max)),
      timer_(clock),
      devices_(DeviceTierOptions(epochs), clock, DeviceEvents()) {}

absl::Status ThreeTierStore::Start(const OpenFragmentTier& open_below, StoreStart start) {
  CRUMB_ASSIGN_OR_RETURN(below_, open_below(BelowEvents()));
  CRUMB_RETURN_IF_ERROR(OpenHost(std::move(start)));
  host_ready_ = true;
  const int64_t part_max_percent = host_state_->part_max_percent();
  // With tenants one thread more than one tenant may use.
  const int spare = part_max_percent < 100 ? 1 : 0;
  readers_ = std::make_unique<Executor>(Executor::Options{
      .name = "crumb-ssd-read",
      .threads = has_below() ? static_cast<int>(options_.ssd.io_threads) + spare : 0,
      .queue_max = static_cast<size_t>(options_.ssd.read_queue_pages_max),
      .part_max_percent = part_max_percent});
  recency_ = std::make_unique<Executor>(Executor::Options{.name = "crumb-recency",
                                                          .threads = 1,
                                                          .queue_max = kRecencyQueueMax,
                                                          .part_max_percent = part_max_percent});
  writer_ = std::make_unique<WriteThrough>(
      WriteThrough::Options{
          .pages_max = static_cast<size_t>(options_.ssd.write_queue_pages_max),
          .bytes_max = has_below() ? host_state_->memory->total_bytes() / kQueuedFraction : 0,
          .part_max_percent = part_max_percent,
          .flush_only_hit = only_hit()},
      *host_, *room_, host_state_->losses, *below_,
      [this](const KeyspaceId& keyspace, const PageKey& key) {
        if (events_.durable) events_.durable(keyspace, key);
      });
  promoter_ = std::make_unique<Promoter>(*host_, *room_, *below_, *writer_, *readers_);
  // The pages that the process before had queued and not written are queued again.
  if (!has_below() || only_hit()) return absl::OkStatus();
  size_t room = static_cast<size_t>(options_.ssd.write_queue_pages_max);
  for (PageWalk walk = host_->BeginWalk(); !walk.over && room > 0;) {
    const WriteThrough::Queueing queueing(*writer_);
    const auto departures = host_->RefAbsentBelow({}, room, UINT64_MAX, &walk);
    room -= std::min(room, departures.size());
    writer_->Enqueue(departures);
  }
  return absl::OkStatus();
}

absl::Status ThreeTierStore::OpenHost(StoreStart start) {
  HostState::Options options = {
      .host = options_.host,
      .tenant_part_max_percent = start.tenant_part_max_percent,
      .demote_only_hit = has_below() && only_hit(),
      .first_bytes = start.host_bytes,
      .sharing =
          start.slabs_of_tenants ? SlabMemory::Sharing::kByTenant : SlabMemory::Sharing::kFixed,
      .free_memory = start.free_memory,
      .page_fragments_max = static_cast<size_t>(options_.page_fragments_max),
      .slab_gone = events_.slab_gone,
      .mark_base = MarkBase()};
  if (start.handed_over != nullptr) {
    LimitToHandedOver(*start.handed_over, &options);
    devices_.AddDeleted(start.handed_over->image.deleted);
    for (const auto& [name, value] : start.handed_over->image.records) {
      if (!has_below()) CRUMB_RETURN_IF_ERROR(below_->PutRecord(name, value));
    }
  }
  CRUMB_ASSIGN_OR_RETURN(host_state_, HostState::Open(options, clock_, EventsOf(Tier::kHost)));
  if (start.handed_over != nullptr) {
    const Adopted adopted = Adopt(*host_state_, std::move(*start.handed_over),
                                  [this](const FragmentMeta& meta) { return BelowOf(meta); });
    LogInfo("host tier: {} pages taken over, {} left out", adopted.pages, adopted.left_out);
  }
  host_.emplace(*host_state_);
  room_.emplace(*host_state_);
  growth_.emplace(*host_state_, *room_);
  leases_.emplace(*host_, devices_, clock_);
  return absl::OkStatus();
}

std::optional<Below> ThreeTierStore::BelowOf(const FragmentMeta& meta) const {
  if (!has_below()) return Below::kRefused;
  if (meta.generation < below_->GenerationOf(meta.keyspace)) return std::nullopt;
  for (const FragmentMeta& there : below_->Find(meta.keyspace, meta.key)) {
    if (there.range == meta.range && there.generation == meta.generation) return Below::kStored;
  }
  return Below::kAbsent;
}

absl::StatusOr<HandedOverMemory> ThreeTierStore::HandOver() {
  CRUMB_ASSIGN_OR_RETURN(HandedOverMemory memory, crumb::storage::HandOver(*host_state_));
  memory.image.deleted = devices_.HandOverDeleted();
  if (!has_below()) {
    CRUMB_ASSIGN_OR_RETURN(memory.image.records, below_->Records());
  }
  return memory;
}

void ThreeTierStore::Announce(const KeyspaceId& keyspace, const PageKey& key, Tier tier,
                              PageEvent::Kind kind) const {
  if (events_.page) events_.page({kind, keyspace, key, tier});
}

DeviceTier::Options ThreeTierStore::DeviceTierOptions(DeletionEpochs epochs) const {
  return {.device = options_.device,
          .page_fragments_max = static_cast<size_t>(options_.page_fragments_max),
          .is_below =
              [this](const FragmentMeta& fragment) {
                std::vector<TileRange> present =
                    host_->Present(fragment.keyspace, fragment.key, fragment.generation);
                for (const FragmentMeta& there : below_->Find(fragment.keyspace, fragment.key)) {
                  const bool known = std::any_of(
                      present.begin(), present.end(),
                      [&](const TileRange& range) { return Overlaps(range, there.range); });
                  if (!known && there.generation >= fragment.generation)
                    present.push_back(there.range);
                }
                return Covers(present, fragment.range);
              },
          .epochs = epochs};
}

FragmentTierEvents ThreeTierStore::EventsOf(Tier tier) const {
  const auto announce = [this, tier](PageEvent::Kind kind) {
    return [this, tier, kind](const KeyspaceId& keyspace, const PageKey& key) {
      Announce(keyspace, key, tier, kind);
    };
  };
  return {.added = announce(PageEvent::Kind::kAdded),
          .removed = announce(PageEvent::Kind::kRemoved)};
}

FragmentTierEvents ThreeTierStore::BelowEvents() {
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

ThreeTierStore::Standing ThreeTierStore::StandingOf(Received received) const {
  const bool home = received == Received::kHome;
  if (!has_below()) return {Below::kRefused, home};
  if (home && !only_hit()) return {Below::kQueued, true};
  return {Below::kAbsent, false};
}

std::vector<TileRange> ThreeTierStore::Present(const FragmentHeader& header, Received received) {
  std::vector<TileRange> present = below_->Present(header.keyspace, header.key, header.generation);
  const std::vector<TileRange> in_host =
      StandingOf(received).owed
          ? host_->Owe(header.keyspace, header.key, header.generation, header.range, present)
          : host_->Present(header.keyspace, header.key, header.generation);
  present.insert(present.end(), in_host.begin(), in_host.end());
  return present;
}

absl::StatusOr<CommitOutcome> ThreeTierStore::Commit(const CommitRequest& request) {
  if (stopped_) return Stopped();
  const FragmentHeader& header = request.header;
  CRUMB_RETURN_IF_ERROR(CheckCommit(request));
  if (header.generation < below_->GenerationOf(header.keyspace)) {
    return absl::InvalidArgumentError("the fragment's generation was dropped");
  }
  int stored_tiles = 0;
  for (int attempt = 0; attempt < kCommitAttemptsMax; ++attempt) {
    CRUMB_ASSIGN_OR_RETURN(const CommittedPieces pieces, CommitMissing(request));
    stored_tiles += pieces.stored_tiles;
    if (pieces.overtaken) continue;
    const int known_tiles = header.range.tiles() - stored_tiles;
    dedup_bytes_.Add(static_cast<uint64_t>(known_tiles) * header.tile_bytes);
    return stored_tiles > 0 ? CommitOutcome::kStored : CommitOutcome::kDeduplicated;
  }
  return absl::ResourceExhaustedError("other fragments of the page come and go all the time");
}

absl::StatusOr<ThreeTierStore::CommittedPieces> ThreeTierStore::CommitMissing(
    const CommitRequest& request) {
  const std::vector<TileRange> present = Present(request.header, Received::kHome);
  const std::vector<TileRange> pieces = Subtract(request.header.range, present);
  if (!pieces.empty() &&
      present.size() + pieces.size() > static_cast<size_t>(options_.page_fragments_max)) {
    return absl::InvalidArgumentError(
        "the page would have more fragments than store.page_fragments_max allows");
  }
  CommittedPieces committed;
  for (const TileRange& piece : pieces) {
    const absl::Status status = CommitPiece(request, piece);
    if (status.ok()) {
      committed.stored_tiles += piece.tiles();
    } else if (absl::IsAborted(status)) {
      return absl::InvalidArgumentError("the fragment's generation was dropped");
    } else if (absl::IsAlreadyExists(status)) {
      committed.overtaken = true;
    } else {
      return status;
    }
  }
  return committed;
}

absl::Status ThreeTierStore::CommitPiece(const CommitRequest& request, const TileRange& piece) {
  const FragmentMeta meta = MetaOf(request.header, piece, request.logical_tile_bytes);
  CRUMB_ASSIGN_OR_RETURN(const Slot slot, writer_->Reserve(meta.keyspace, meta.bytes));
  absl::Status copied =
      CopyFragment(request.header, request.tiles, piece, room_->Memory(slot).first(meta.bytes));
  if (!copied.ok()) {
    verify_failures_.Add();
    room_->Abandon(slot);
    return copied;
  }
  if (has_below() && only_hit()) admission_rejected_.Add();
  return Publish(meta, slot, Received::kHome);
}

// Takes the slot, whatever comes of it.
absl::Status ThreeTierStore::Publish(const FragmentMeta& meta, const Slot& slot,
                                     Received received) {
  const auto [below, owed] = StandingOf(received);
  const WriteThrough::Queueing queueing(*writer_);
  CRUMB_ASSIGN_OR_RETURN(const PageHandle page, host_->Publish(meta, slot, below, owed));
  if (below == Below::kQueued) {
    writer_->Enqueue(std::vector<Departure>{{page, meta}});
  } else {
    host_->EndWrite(page);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<IncomingSlot>> ThreeTierStore::ReserveIncoming(
    const KeyspaceId& keyspace, uint64_t bytes) {
  if (stopped_) return Stopped();
  CRUMB_ASSIGN_OR_RETURN(const Slot slot, writer_->Reserve(keyspace, bytes));
  return std::make_shared<HostIncomingSlot>(*room_, slot, bytes);
}

absl::StatusOr<CommitOutcome> ThreeTierStore::PublishIncoming(
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
  const std::vector<TileRange> present = Present(header, received);
  if (Covers(present, header.range)) return CommitOutcome::kDeduplicated;
  const bool overlaps = std::any_of(present.begin(), present.end(), [&](const TileRange& there) {
    return Overlaps(there, header.range);
  });
  if (overlaps) {  // only the tiles that are missing, as pieces of their own
    return Commit({.header = header,
                   .tiles = std::span<const std::byte>(slot->memory()).first(meta.tiles_bytes),
                   .logical_tile_bytes = logical_tile_bytes});
  }
  const absl::Status published = Publish(meta, incoming.Take(), received);
  if (published.ok()) return CommitOutcome::kStored;
  if (absl::IsAlreadyExists(published)) {  // a commit has brought some of its tiles meanwhile
    if (Covers(Present(header, received), header.range)) return CommitOutcome::kDeduplicated;
    return absl::ResourceExhaustedError("other fragments of the page come at the same time");
  }
  if (absl::IsAborted(published)) {
    return absl::InvalidArgumentError("the fragment's generation was dropped");
  }
  return published;
}

void ThreeTierStore::Flush(const FlushScope& scope, std::optional<uint64_t> since,
                           std::function<void(const FlushReport&)> done) {
  writer_->Flush(scope, since, [this, scope, done = std::move(done)](FlushReport report) {
    report.durable_pages = PagesBelow(scope);
    done(report);
  });
}

uint64_t ThreeTierStore::PagesBelow(const FlushScope& scope) const {
  if (!scope.has_value()) {
    StoreStats stats;
    below_->AddStats(stats);
    return stats.ssd.pages;
  }
  uint64_t pages = 0;
  for (const KeyspaceId& keyspace : host_state_->losses.KeyspacesOf(*scope)) {
    pages += below_->KeyspacePages(keyspace);
  }
  return pages;
}

// Host memory first: a page is in the tier below before it leaves.
Durability ThreeTierStore::DurabilityOf(const KeyspaceId& keyspace, const PageKey& key,
                                        uint64_t generation, const TileRange& range) const {
  if (!has_below()) return Durability::kNone;
  const std::vector<TileRange> in_host = host_->Present(keyspace, key, generation);
  if (Covers(below_->Present(keyspace, key, generation), range)) return Durability::kDurable;
  return in_host.empty() ? Durability::kNone : Durability::kPending;
}

absl::StatusOr<uint32_t> ThreeTierStore::Pin(const KeyspaceId& keyspace,
                                             std::span<const PageKey> keys, TimePoint until) {
  uint32_t pinned = 0;
  for (const PageKey& key : keys) {
    const std::span<const PageKey> one(&key, 1);
    MutexLock lock(&pins_mutex_);
    const uint64_t below_bytes = BytesOf(below_->Find(keyspace, key));
    CRUMB_ASSIGN_OR_RETURN(const bool in_host, host_->Pin(keyspace, key, below_bytes, until));
    const bool below = below_->Pin(keyspace, one, until) > 0;
    // It may have left the tier below since its bytes were read.
    if (!below) host_->EndPinBelow(keyspace, key);
    const bool on_device = devices_.Pin(keyspace, one, until) > 0;
    if (in_host || below || on_device) ++pinned;
  }
  return pinned;
}

uint32_t ThreeTierStore::Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  uint32_t unpinned = 0;
  for (const PageKey& key : keys) {
    const std::span<const PageKey> one(&key, 1);
    MutexLock lock(&pins_mutex_);
    const bool in_host = host_->Unpin(keyspace, key);
    const bool below = below_->Pin(keyspace, one, TimePoint::min()) > 0;
    const bool on_device = devices_.Pin(keyspace, one, TimePoint::min()) > 0;
    if (in_host || below || on_device) ++unpinned;
  }
  return unpinned;
}

uint64_t ThreeTierStore::PageBytes(const KeyspaceId& keyspace, const PageKey& key) const {
  const auto in_host = host_->Summary(keyspace, key);
  return std::max(BytesOf(below_->Find(keyspace, key)), in_host ? in_host->bytes : 0);
}

// First no page comes up from the tier below any more. Then devices and host memory, then the pages
// on their way down, then the tier below.
absl::StatusOr<uint32_t> ThreeTierStore::Delete(const KeyspaceId& keyspace,
                                                std::span<const PageKey> keys) {
  const Promoter::Suspension suspension(*promoter_, keyspace, keys);
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
  CRUMB_RETURN_IF_ERROR(below_->Remove(keyspace, keys).status());
  return static_cast<uint32_t>(removed.size()) + only_below;
}

absl::StatusOr<uint64_t> ThreeTierStore::DropKeyspace(const KeyspaceId& keyspace,
                                                      uint64_t generation) {
  std::vector<PageKey> removed = devices_.Drop(keyspace, generation);
  const std::vector<PageKey> in_host = host_->Drop(keyspace, generation);
  removed.insert(removed.end(), in_host.begin(), in_host.end());
  std::sort(removed.begin(), removed.end());
  removed.erase(std::unique(removed.begin(), removed.end()), removed.end());
  uint64_t only_above = 0;
  for (const PageKey& key : removed) {
    if (below_->Find(keyspace, key).empty()) ++only_above;
  }
  CRUMB_ASSIGN_OR_RETURN(const uint64_t below, below_->Drop(keyspace, generation));
  return only_above + below;
}

std::optional<PageKey> ThreeTierStore::ParentOf(const KeyspaceId& keyspace,
                                                const PageKey& key) const {
  if (const auto in_host = host_->Summary(keyspace, key)) return in_host->parent;
  if (const auto parent = devices_.ParentOf(keyspace, key)) return parent;
  const std::vector<FragmentMeta> below = below_->Find(keyspace, key);
  if (below.empty()) return std::nullopt;
  return below.front().parent;
}

void ThreeTierStore::ForEachPage(const KeyspaceId& keyspace,
                                 const std::function<void(const PageKey&, Tier)>& visit) {
  devices_.ForEachPage(keyspace, [&](const PageKey& key) { visit(key, Tier::kDevice); });
  host_->ForEachPage(keyspace, [&](const PageKey& key) { visit(key, Tier::kHost); });
  below_->ForEachPage(keyspace, [&](const PageKey& key) { visit(key, Tier::kSsd); });
}

StoreStats ThreeTierStore::Stats() const {
  StoreStats stats;
  below_->AddStats(stats);
  host_->AddStats(stats);
  devices_.AddStats(stats);
  leases_->AddStats(stats);
  stats.durable_pages = writer_->durable_pages();
  stats.dedup_bytes = dedup_bytes_.value();
  stats.write_queue_pages = writer_->queued();
  stats.write_queue_dropped = writer_->dropped();
  stats.pending_forgotten = pending_.forgotten();
  stats.lost_pages = has_below() ? host_state_->losses.total() : 0;
  stats.admission_rejected = admission_rejected_.value();
  stats.promoted_pages = promoter_->promoted();
  stats.ssd_reads_refused = promoter_->refused();
  stats.demoted_pages = writer_->demoted();
  stats.verify_failures_commit = verify_failures_.value();
  return stats;
}

absl::Status ThreeTierStore::Stop(Duration grace) {
  if (stopped_.exchange(true) || promoter_ == nullptr) return absl::OkStatus();
  readers_->Stop();
  recency_->Stop();
  writer_->Stop(std::chrono::steady_clock::now() + grace);
  return below_->Sync();
}

}  // namespace crumb::storage
