// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/config_visitor.h"
#include "common/flush_report.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "common/unique_fd.h"
#include "common/wire_enums.h"
#include "storage/host_image.h"
#include "storage/store_options.h"
#include "storage/store_stats.h"

namespace crumb::storage {

// The deletions of which a node knows. A process that uses a device pool survives crashes of
// crumbd, and says afterwards which pages lie in its slots. Pages that were deleted while it was
// away must not be served from there. The device tier notes deleted pages in memory, and a crash
// loses the notes.
//
// An epoch is the time over which such notes are kept: it begins when crumbd starts without the
// memory of another, and ends with the crash of the last crumbd to which that memory was handed
// over. A pool's roster has the epoch in which all processes of the pool had last said what they
// hold. If that is the current epoch or the one before, no deletion was missed: those of the
// current epoch are noted, and those of the one before removed the pages from the pool, or marked
// their slots in the roster. With any older epoch, slots are claimed without their pages.
struct DeletionEpochs {
  uint64_t current = 1;  // not 0
  uint64_t previous = 1;

  bool Knows(uint64_t epoch) const { return epoch == current || epoch == previous; }
};

class DeviceTier;

// One leased fragment in host memory: `tiles_bytes` of tiles and then the encoded header, at
// `offset` of slab `slab`.
struct FragmentRef {
  uint32_t page = 0;  // index into the request's keys
  uint32_t slab = 0;
  uint64_t offset = 0;
  uint32_t tiles_bytes = 0;
};

using DevicePoolNumber = uint32_t;  // never used again

// One leased fragment in a slot of a device pool, which holds tiles only.
struct DeviceFragmentRef {
  uint32_t page = 0;  // index into the request's keys
  DevicePoolNumber pool = 0;
  uint64_t slot = 0;
  std::shared_ptr<const FragmentHeader> header;
};

using LeaseId = uint64_t;  // 0: none

struct AcquireRequest {
  KeyspaceId keyspace;
  uint64_t generation = 0;    // copies of older generations are misses
  std::vector<PageKey> keys;  // in prefix order
  TileRange range;
  TimePoint deadline;  // for lower tiers; host hits are served whatever the time
  // Device pools whose pages count, before those in host memory; the best first.
  std::vector<DevicePoolNumber> pools = {};
  // Fragments, in host memory and on devices together, that the answer may name: the prefix ends,
  // busy, before the page with which there would be more.
  size_t fragments_max = SIZE_MAX;
  // The prefix ends, busy, before the page in host memory with which the keyspace's tenant would
  // keep more than its part (StoreStart::tenant_part_max_percent).
  bool within_part = false;
};

struct AcquireResult {
  LeaseId lease = 0;  // 0 when hit_pages is 0
  uint32_t hit_pages = 0;
  std::vector<Tier> page_tiers;        // [hit_pages] where each was found
  std::vector<FragmentRef> fragments;  // ascending by page
  MissReason miss_reason = MissReason::kNone;
  std::vector<DeviceFragmentRef> device_fragments = {};  // ascending by page
  bool part_full = false;  // the prefix ended by AcquireRequest::within_part
};

// The pages of a lease.
struct LeasedPages {
  uint32_t pages = 0;
  std::vector<FragmentRef> fragments;  // ascending by page
  std::vector<DeviceFragmentRef> device_fragments = {};
};

struct LookupResult {
  uint32_t hit_pages = 0;
  std::vector<Tier> page_tiers;
  MissReason miss_reason = MissReason::kNone;
};

// A fragment to be committed. Others may write to the memory of its tiles meanwhile, so each of
// their bytes is read once; everything else about the fragment is in `header`, which the caller
// decoded from a private copy and checked against the keyspace.
struct CommitRequest {
  FragmentHeader header;
  std::span<const std::byte> tiles;  // layer by layer and head by head
  uint32_t logical_tile_bytes = 0;   // of the same tile in BF16, for the bytes-saved counters
};

// How a fragment stands with the tier that survives a crash.
enum class Durability : uint8_t {
  kNone,     // it is not here, or there is no such tier
  kPending,  // it is in memory and may become durable
  kDurable,  // all its tiles are synced to the SSD tier
};

// Host memory that a fragment from elsewhere is received into; it is not visible until it is
// published. Freed with the last reference unless it was.
class IncomingSlot {
 public:
  virtual ~IncomingSlot() = default;
  // Room for tiles and header.
  virtual std::span<std::byte> memory() = 0;
};

// The role of a received fragment on this node.
enum class Received : uint8_t {
  kCopy,  // another node keeps it: written to the SSD tier only when it leaves host memory
  kHome,  // this node keeps it: written through as commits are
};

// A memory slab that readers map: the descriptor is sealed against new writable mappings.
struct Slab {
  int fd = -1;  // owned by the store
  uint64_t bytes = 0;
};

// An event that watchers receive.
struct PageEvent {
  enum class Kind : uint8_t { kAdded, kRemoved };
  Kind kind = Kind::kAdded;
  KeyspaceId keyspace;
  PageKey key;
  Tier tier = Tier::kHost;
};

// Callbacks run on the store's threads or inside a call, never under a lock; they must not block.
struct StoreEvents {
  // Index and bytes of this page are synced to the SSD tier.
  std::function<void(const KeyspaceId&, const PageKey&)> durable;
  std::function<void(const PageEvent&)> page;
  // Nothing will be read in this slab any more, and its number names no other: processes that map
  // it must let it go.
  std::function<void(uint32_t slab)> slab_gone = {};
};

// The state in which a store opens.
struct StoreStart {
  // With tenants told apart: the percentage of host memory, less what the other tenants keep, that
  // one tenant may keep from being reused. Every page in host memory that it leases, reads or has
  // pinned counts, once and with all its bytes, a removed one until its last lease ends; and so do
  // the bytes that a pin keeps in the SSD tier beyond those. 0: not counted and not bounded.
  int64_t tenant_part_max_percent = 0;
  // Each slab holds one tenant's pages at a time, and SetTenant may be called.
  bool slabs_of_tenants = false;
  // Bytes of memory that this process could take now. Read before the memory of a slab that moved
  // is taken again: processes may pin pages of the old one. Null: not limited.
  std::function<uint64_t()> free_memory = {};
  uint64_t host_bytes = UINT64_MAX;  // to take of host.bytes_max at once; GrowHost takes the rest
  // Host memory of the process before, which has ended or will write no more: its pages are served
  // from where they are. What does not fit or does not check is left out, and nothing of it an
  // error.
  std::unique_ptr<HandedOverMemory> handed_over = nullptr;
  DeletionEpochs epochs = {};
};

// All tiers of one node as one store of fragments: what is committed is visible at once in host
// memory, written through to the SSD tier in the background, and brought up again when asked for.
// docs/architecture.md, "Life of an evicted window". Thread-safe.
class TieredStore {
 public:
  // Takes the memory, opens or creates the SSD folder and recovers its index. Errors name the
  // setting or file: kInvalidArgument options, kFailedPrecondition a read-only or foreign folder,
  // kResourceExhausted no memory or disk.
  static absl::StatusOr<std::unique_ptr<TieredStore>> Open(const StoreOptions& options,
                                                           Clock& clock, StoreEvents events,
                                                           StoreStart start = {});
  virtual ~TieredStore() = default;

  // Copies a fragment's tiles, checks their sums on the way, and makes the copy visible. Pure CPU
  // work. kDataLoss: a sum is wrong; kInvalidArgument: generation, size or ranges are;
  // kResourceExhausted: every slot is leased, or the page is leased or pinned and its tenant would
  // keep more than its part.
  virtual absl::StatusOr<CommitOutcome> Commit(const CommitRequest& request) = 0;

  // Room for a fragment of the keyspace of `bytes`, tiles and header. kResourceExhausted: every
  // slot is leased.
  virtual absl::StatusOr<std::shared_ptr<IncomingSlot>> ReserveIncoming(const KeyspaceId& keyspace,
                                                                        uint64_t bytes) = 0;

  // Makes visible what was received into `slot`: the tiles that `header` names, whose sums the
  // caller has verified, and no more is written there. The header behind them is written here.
  // Errors as those of Commit.
  virtual absl::StatusOr<CommitOutcome> PublishIncoming(const std::shared_ptr<IncomingSlot>& slot,
                                                        const FragmentHeader& header,
                                                        uint32_t logical_tile_bytes,
                                                        Received received) = 0;

  // Leases the longest covered prefix. `done` is called exactly once: before this returns when host
  // memory has everything, else from a store thread.
  virtual void Acquire(AcquireRequest request,
                       std::function<void(absl::StatusOr<AcquireResult>)> done) = 0;

  virtual LookupResult Lookup(const AcquireRequest& request) = 0;

  // The leased fragments that intersect `range`, by page; nothing when the lease is unknown.
  virtual std::optional<LeasedPages> ReadLease(LeaseId lease, const TileRange& range) const = 0;

  // Ends a lease. False: unknown.
  virtual bool Release(LeaseId lease) = 0;

  // The bytes of a leased fragment, tiles and header. Valid until the lease ends.
  virtual std::span<const std::byte> Bytes(const FragmentRef& fragment) const = 0;

  // Writes every page that was committed before, and admitted (store.ssd.admission), to the SSD
  // tier, each once, and calls `done` with what came of it. Pages that only device pools hold are
  // not covered. The report is on the keyspaces of `scope` (SetOwner) alone. `since` is a mark of
  // that scope: pages lost from there on are reported; without one, those lost since the last Flush
  // of the scope without one.
  virtual void Flush(const FlushScope& scope, std::optional<uint64_t> since,
                     std::function<void(const FlushReport&)> done) = 0;
  // A mark for a later Flush of the scope that covers every page committed from now on.
  virtual uint64_t FlushMark(const FlushScope& scope) const = 0;
  // How a page's tiles of `range`, of this generation or a newer one, stand. Does not block.
  virtual Durability DurabilityOf(const KeyspaceId& keyspace, const PageKey& key,
                                  uint64_t generation, const TileRange& range) const = 0;

  // Marks pages as being committed for a while: their misses get this reason, and callers do not
  // wait for them. tenant: the keyspace's, "" for none.
  virtual void SetPending(const KeyspaceId& keyspace, const std::string& tenant,
                          std::span<const PageKey> keys) = 0;

  // Returns how many pages were there. kResourceExhausted: the tenant would keep more than its part
  // with a page; those before it are pinned.
  virtual absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                       TimePoint until) = 0;
  virtual uint32_t Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) = 0;
  // Removes pages from every tier and returns how many were there; leased slots are reused when
  // their leases end. kUnavailable: no page is served any more, but the SSD tier could not note it:
  // pages may be there again after a restart. Blocks on the SSD tier, and so do DropKeyspace and
  // PutRecord.
  virtual absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                          std::span<const PageKey> keys) = 0;
  // Removes every page of the keyspace whose generation is below `generation`. Error as Delete's.
  virtual absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace,
                                                uint64_t generation) = 0;

  // Small persistent records of the server beside the index (node id, keyspaces, states). An empty
  // value removes the record durably. Without an SSD tier records live as long as the process.
  virtual absl::Status PutRecord(const std::string& name, const std::string& value) = 0;
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() = 0;

  // The page before this one in its sequence, zeros for the first; none when the page is absent.
  // Does not block.
  virtual std::optional<PageKey> ParentOf(const KeyspaceId& keyspace, const PageKey& key) const = 0;

  // Bytes of the keyspace's fragments, tiles and headers, in all tiers together: what is in two
  // counts twice, and what was removed counts until nothing refers to it. Does not block.
  virtual uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const = 0;

  // Bytes of the page's fragments in host memory or, if they are more, on the SSD; 0: it is in
  // neither. Does not block.
  virtual uint64_t PageBytes(const KeyspaceId& keyspace, const PageKey& key) const = 0;

  // Every page there is, for snapshots.
  virtual void ForEachPage(const KeyspaceId& keyspace,
                           const std::function<void(const PageKey&, Tier)>& visit) = 0;

  virtual std::vector<Slab> slabs() const = 0;
  // Counts the keyspace's pages as the tenant's in Flush and in the tenant's part of host memory.
  // REQUIRES: the keyspace has no pages, or the store was just opened.
  virtual void SetOwner(const KeyspaceId& keyspace, const std::string& tenant) = 0;
  // The keyspace has ended, and no tier has pages of it.
  virtual void ForgetOwner(const KeyspaceId& keyspace) = 0;
  // Keeps the keyspace's pages in slabs of this tenant's own from now on; those that are elsewhere
  // leave host memory, and are lost if no tier below has them. kFailedPrecondition: the store was
  // opened without slabs_of_tenants.
  virtual absl::Status SetTenant(const KeyspaceId& keyspace, const std::string& tenant) = 0;
  // A descriptor for reading of a slab that pages of the keyspace lie in. Its file never holds
  // another tenant's pages. kPermissionDenied: the slab is not of the keyspace's
  // tenant.
  virtual absl::StatusOr<UniqueFd> OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const = 0;
  // Takes up to `bytes` of the host memory that is missing yet, moves pages out of slabs that were
  // handed over, and returns how many bytes are missing or to be moved then. Blocks meanwhile.
  // kResourceExhausted: the memory is not there.
  virtual absl::StatusOr<uint64_t> GrowHost(uint64_t bytes) = 0;

  // Pages in device pools, as a part of this store; null: it has no such tier.
  virtual DeviceTier* devices() { return nullptr; }
  virtual StoreStats Stats() const = 0;

  // Calls that wait for pages end with what is there, now and from now on: a caller that waits long
  // must not hold up a stop or a takeover.
  virtual void EndWaits() {}

  // Refuses new work, writes what is queued for the SSD within `grace`, syncs. Idempotent.
  virtual absl::Status Stop(Duration grace) = 0;

  // Returns host memory for a successor process. Call after Stop, once nothing reads or writes here
  // any more; then destroy the store, which releases the SSD folder.
  virtual absl::StatusOr<HandedOverMemory> HandOver() = 0;
};

}  // namespace crumb::storage
