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

// Identifies the deletions that a node has a record of. A process that uses a device pool survives
// crashes of crumbd and reports afterwards which pages its slots have. Pages that were deleted
// while it was disconnected must not be served from those slots. The device tier records deleted
// pages in memory, and a crash loses these records.
//
// An epoch is a period without such a loss: it begins when crumbd starts without the memory of a
// predecessor, and ends with the crash of the last crumbd to which that memory was handed over. A
// pool's roster stores the epoch in which all processes of the pool had last reported their slots.
// If that is the current epoch or the previous one, no deletion was missed: deletions of the
// current epoch are recorded, and those of the previous one removed the pages from the pool or
// marked their slots in the roster. With any older epoch, slots are claimed without their pages.
struct DeletionEpochs {
  uint64_t current = 1;  // 0 is never an epoch
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
  std::vector<PageKey> keys;  // sorted from the start of the prefix
  TileRange range;
  TimePoint deadline;  // limits reads of lower tiers; host hits are served even after it
  // Device pools that are searched before host memory, in order of preference.
  std::vector<DevicePoolNumber> pools = {};
  // Limit of the fragments that the result names, in host memory and on devices together. The
  // prefix ends with MissReason::kBusy before the page that would exceed it.
  size_t fragments_max = SIZE_MAX;
  // If true, the prefix ends with MissReason::kBusy before the page in host memory with which the
  // keyspace's tenant would hold more than its part (StoreStart::tenant_part_max_percent).
  bool within_part = false;
};

struct AcquireResult {
  LeaseId lease = 0;  // 0 when hit_pages is 0
  uint32_t hit_pages = 0;
  std::vector<Tier> page_tiers;        // [hit_pages] the tier that each page was found in
  std::vector<FragmentRef> fragments;  // ascending by page
  MissReason miss_reason = MissReason::kNone;
  std::vector<DeviceFragmentRef> device_fragments = {};  // ascending by page
  bool part_full = false;  // AcquireRequest::within_part ended the prefix
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

// A fragment to be committed. Other processes may write to the memory of its tiles during the
// commit, so each of their bytes is read once. `header` has all other data of the fragment; the
// caller decoded it from a private copy and checked it against the keyspace.
struct CommitRequest {
  FragmentHeader header;
  std::span<const std::byte> tiles;  // layer by layer and head by head
  uint32_t logical_tile_bytes = 0;   // the tile's size in BF16; the bytes-saved counters use it
};

// Whether a fragment would survive a crash.
enum class Durability : uint8_t {
  kNone,     // the store does not have it, or has no SSD tier
  kPending,  // it is in memory and may become durable
  kDurable,  // all its tiles are synced to the SSD tier
};

// Host memory that a fragment of another node is received into. The fragment is not visible until
// it is published. An unpublished slot is freed with its last reference.
class IncomingSlot {
 public:
  virtual ~IncomingSlot() = default;
  // Returns the memory for tiles and header.
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
  // The slab is not used any more, and its number is not used again: processes that map it must
  // unmap it.
  std::function<void(uint32_t slab)> slab_gone = {};
};

// The state in which a store opens.
struct StoreStart {
  // Limit of the host memory that one tenant may keep from being reused, if the server
  // distinguishes tenants: a percentage of the host memory that other tenants do not keep. Every
  // page in host memory that the tenant leases, reads or has pinned counts, once and with all its
  // bytes, a removed page until its last lease ends. If a pinned page has more bytes on the SSD
  // than in host memory, the difference counts too. 0: not counted and not bounded.
  int64_t tenant_part_max_percent = 0;
  // Each slab holds one tenant's pages at a time, and SetTenant may be called.
  bool slabs_of_tenants = false;
  // Returns the bytes of memory that this process could allocate now. The store calls it before it
  // allocates memory for a slab that moved to another tenant, because processes may still pin pages
  // of the old file. Null: not limited.
  std::function<uint64_t()> free_memory = {};
  // Bytes of host.bytes_max that Open allocates; GrowHost allocates the rest.
  uint64_t host_bytes = UINT64_MAX;
  // Host memory of a predecessor process that has ended or will write no more. Its pages are served
  // in place. Pages that do not fit or fail a check are left out; that is not an error.
  std::unique_ptr<HandedOverMemory> handed_over = nullptr;
  DeletionEpochs epochs = {};
};

// All tiers of one node as one store of fragments. A committed fragment is visible in host memory
// at once, is written to the SSD tier in the background, and is copied back to host memory when a
// caller acquires it after it left (docs/architecture.md, "Life of an evicted window").
// Thread-safe.
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

  // Reserves host memory for a fragment of the keyspace with `bytes` of tiles and header.
  // kResourceExhausted: every slot is leased.
  virtual absl::StatusOr<std::shared_ptr<IncomingSlot>> ReserveIncoming(const KeyspaceId& keyspace,
                                                                        uint64_t bytes) = 0;

  // Makes the fragment that was received into `slot` visible: writes the header behind its tiles.
  // Errors are those of Commit. REQUIRES: the caller has verified the checksums of the tiles that
  // `header` names, and no more is written to the slot.
  virtual absl::StatusOr<CommitOutcome> PublishIncoming(const std::shared_ptr<IncomingSlot>& slot,
                                                        const FragmentHeader& header,
                                                        uint32_t logical_tile_bytes,
                                                        Received received) = 0;

  // Leases the longest covered prefix. `done` is called exactly once: before this returns when host
  // memory has everything, else from a store thread.
  virtual void Acquire(AcquireRequest request,
                       std::function<void(absl::StatusOr<AcquireResult>)> done) = 0;

  virtual LookupResult Lookup(const AcquireRequest& request) = 0;

  // Returns the leased fragments that intersect `range`, ascending by page; none if the lease is
  // unknown.
  virtual std::optional<LeasedPages> ReadLease(LeaseId lease, const TileRange& range) const = 0;

  // Ends a lease. Returns false if it is unknown.
  virtual bool Release(LeaseId lease) = 0;

  // Returns the tiles and the header of a leased fragment. They are valid until the lease ends.
  virtual std::span<const std::byte> Bytes(const FragmentRef& fragment) const = 0;

  // Writes every page that was committed before, and admitted (store.ssd.admission), to the SSD
  // tier, each once, and calls `done` with a report. Pages that only device pools hold are not
  // covered. The report covers the keyspaces of `scope` (SetOwner). With `since`, a mark of that
  // scope, it has the pages lost since the mark; without, those lost since the scope's last Flush
  // without a mark.
  virtual void Flush(const FlushScope& scope, std::optional<uint64_t> since,
                     std::function<void(const FlushReport&)> done) = 0;
  // Returns a mark for a later Flush of the scope that covers every page committed from now on.
  virtual uint64_t FlushMark(const FlushScope& scope) const = 0;
  // Returns the durability of the page's tiles in `range`, if it is of this generation or a newer
  // one. Does not block.
  virtual Durability DurabilityOf(const KeyspaceId& keyspace, const PageKey& key,
                                  uint64_t generation, const TileRange& range) const = 0;

  // Marks pages as being committed for a while: their misses get this reason, and callers do not
  // wait for them. `tenant` is the keyspace's tenant, or "".
  virtual void SetPending(const KeyspaceId& keyspace, const std::string& tenant,
                          std::span<const PageKey> keys) = 0;

  // Protects resident pages from eviction until then. Returns how many pages were resident.
  // kResourceExhausted: with one of the pages the tenant would hold more than its part; the pages
  // before it are pinned.
  virtual absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                       TimePoint until) = 0;
  virtual uint32_t Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) = 0;
  // Removes pages from every tier and returns how many were resident; leased slots are reused when
  // their leases end. kUnavailable: the pages are not served any more, but the SSD tier could not
  // record this, and a restart may bring them back. Delete, DropKeyspace and PutRecord block on the
  // SSD tier.
  virtual absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                          std::span<const PageKey> keys) = 0;
  // Removes every page of the keyspace whose generation is below `generation`. Error as Delete's.
  virtual absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace,
                                                uint64_t generation) = 0;

  // Small persistent records of the server beside the index (node id, keyspaces, states). An empty
  // value removes the record durably. Without an SSD tier records live as long as the process.
  virtual absl::Status PutRecord(const std::string& name, const std::string& value) = 0;
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() = 0;

  // Returns the key of the page before this one in its sequence, zeros for the first page; none if
  // this page is absent. Does not block.
  virtual std::optional<PageKey> ParentOf(const KeyspaceId& keyspace, const PageKey& key) const = 0;

  // Returns the bytes of the keyspace's fragments, tiles and headers, in all tiers together: a
  // fragment in two tiers counts twice, and a removed one counts until its last reference ends.
  // Does not block.
  virtual uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const = 0;

  // Returns the bytes of the page's fragments in host memory or on the SSD, whichever are more; 0
  // if it is in neither. Does not block.
  virtual uint64_t PageBytes(const KeyspaceId& keyspace, const PageKey& key) const = 0;

  // Visits every page of the keyspace in every tier; snapshots of events begin with these.
  virtual void ForEachPage(const KeyspaceId& keyspace,
                           const std::function<void(const PageKey&, Tier)>& visit) = 0;

  virtual std::vector<Slab> slabs() const = 0;
  // Assigns the keyspace to a tenant, for Flush and for the tenant's part of host memory.
  // REQUIRES: the keyspace has no pages, or the store was just opened.
  virtual void SetOwner(const KeyspaceId& keyspace, const std::string& tenant) = 0;
  // The keyspace has ended, and no tier has pages of it.
  virtual void ForgetOwner(const KeyspaceId& keyspace) = 0;
  // Keeps the keyspace's pages in slabs of this tenant alone from now on. Its pages in other slabs
  // are evicted from host memory, and are lost if no tier below has them. kFailedPrecondition: the
  // store was opened without slabs_of_tenants.
  virtual absl::Status SetTenant(const KeyspaceId& keyspace, const std::string& tenant) = 0;
  // Returns a read-only descriptor of a slab that has pages of the keyspace. Its file never has
  // pages of another tenant. kPermissionDenied: the slab is not of the keyspace's tenant.
  virtual absl::StatusOr<UniqueFd> OpenSlab(uint32_t slab, const KeyspaceId& keyspace) const = 0;
  // Allocates up to `bytes` of the host memory that Open left, moves pages out of slabs that were
  // handed over, and returns how many bytes are still to be allocated or moved. Blocks.
  // kResourceExhausted: the system has no such memory.
  virtual absl::StatusOr<uint64_t> GrowHost(uint64_t bytes) = 0;

  // Returns the tier of device pools; null if the store has none.
  virtual DeviceTier* devices() { return nullptr; }
  virtual StoreStats Stats() const = 0;

  // Ends the waits of calls for pages, present and future ones: they return the pages found so far.
  // A caller that waits must not delay a stop or a takeover.
  virtual void EndWaits() {}

  // Refuses new calls, writes the fragments that are queued for the SSD until `grace` is over, and
  // syncs. Idempotent.
  virtual absl::Status Stop(Duration grace) = 0;

  // Returns host memory for a successor process. Destroy the store afterwards, which releases the
  // SSD folder. REQUIRES: Stop has returned, and no caller reads or writes host memory any more.
  virtual absl::StatusOr<HandedOverMemory> HandOver() = 0;
};

}  // namespace crumb::storage
