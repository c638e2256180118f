// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "common/wire_enums.h"

namespace crumb::client {

using crumb::MissReason;
using crumb::MissReasonName;
using crumb::Tier;
using crumb::TierName;

// DeviceUuid names a device in every process and container of the host, where its ordinal may
// differ.
struct DeviceUuid {
  std::array<uint8_t, 16> bytes{};

  std::string ToBytes() const { return {reinterpret_cast<const char*>(bytes.data()), 16}; }
  friend bool operator==(const DeviceUuid&, const DeviceUuid&) = default;
};

// PoolId names a pool of device memory. crumbd chooses it at random and keeps it over a restart. It
// is the name by which processes recognize a pool that they held slots in before crumbd was
// restarted.
struct PoolId {
  std::array<uint8_t, 16> bytes{};

  std::string ToBytes() const { return {reinterpret_cast<const char*>(bytes.data()), 16}; }
  // Returns zeros unless `text` has 16 bytes.
  static PoolId FromBytes(std::string_view text) {
    PoolId id;
    if (text.size() == id.bytes.size()) std::memcpy(id.bytes.data(), text.data(), text.size());
    return id;
  }
  friend bool operator==(const PoolId&, const PoolId&) = default;
};

// A fragment in a slot of a device pool. The slot holds the tiles only; crumbd keeps the header.
// The memory that `shape`, `header` and `tile_sums` refer to is valid while the lease lives.
struct DeviceFragment {
  int page = 0;  // index into AcquireRequest::keys
  PoolId pool;
  uint64_t slot = 0;
  // The header fields that all fragments of one shape have in common: all except key, parent,
  // position and tile checksums.
  const FragmentHeader* shape = nullptr;
  // The encoded header (see EncodeFragmentHeader) and the tile checksums in it, for fragments of
  // peers and where AcquireRequest::device_sums requested them. With AcquireRequest::peer_sums the
  // header is empty and `tile_sums` has the checksums of those tiles only.
  std::span<const std::byte> header;
  std::span<const uint32_t> tile_sums;
};

// A fragment in crumbd's shared memory. Its header was decoded and compared with the request; its
// tiles have not been read yet.
//
// A page consists of one or more fragments, each with a range of layers and KV heads. A caller that
// needs tiles of several fragments finds them by header.range.
struct LeasedFragment {
  int page = 0;           // index into AcquireRequest::keys
  FragmentHeader header;  // tile_sums is empty
  // Both are valid while the lease lives, in the order layer by layer, head by head.
  std::span<const uint32_t> tile_sums;
  std::span<const std::byte> tiles;

  // Reads every byte. kDataLoss names the first tile whose checksum differs.
  absl::Status VerifyTiles() const { return VerifyTileSums(header, tile_sums, tiles); }
};

// Pages that stay where they are until the Lease is destroyed. A lease outlives the connection it
// came over: if crumbd dies, the memory stays mapped. Thread-safe once constructed. It must not
// outlive its Client.
//
// The bytes at LeasedFragment::tiles do not move and are not overwritten until the lease ends.
// Deleting a page, or dropping its keyspace, does not end a lease: the holder reads on, and the
// slot is reused afterwards. A lease belongs to an engine: crumbd ends it when the engine's last
// process has ended.
class Lease {
 public:
  // `hold` keeps the memory mapped and ends the lease when its last reference goes; `device_store`
  // owns the memory that device fragments refer to; `epoch` is that of the crumbd that granted the
  // lease.
  Lease(std::vector<LeasedFragment> fragments, std::shared_ptr<void> hold)
      : Lease(std::move(fragments), {}, nullptr, 0, std::move(hold)) {}
  Lease(std::vector<LeasedFragment> fragments, std::vector<DeviceFragment> device_fragments,
        std::shared_ptr<const void> device_store, uint64_t epoch, std::shared_ptr<void> hold)
      : fragments_(std::move(fragments)),
        device_fragments_(std::move(device_fragments)),
        device_store_(std::move(device_store)),
        epoch_(epoch),
        hold_(std::move(hold)) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Fragments in host memory, in ascending order of pages.
  std::span<const LeasedFragment> fragments() const { return fragments_; }
  // Fragments in device pools that the Acquire named, in ascending order of pages.
  std::span<const DeviceFragment> device_fragments() const { return device_fragments_; }
  // Owns the memory that device fragments refer to; it may be kept longer than the lease.
  const std::shared_ptr<const void>& device_store() const { return device_store_; }
  // The epoch of the crumbd that granted the lease. A restarted crumbd does not know the slots that
  // only this lease holds.
  uint64_t epoch() const { return epoch_; }

 private:
  std::vector<LeasedFragment> fragments_;
  std::vector<DeviceFragment> device_fragments_;
  std::shared_ptr<const void> device_store_;
  uint64_t epoch_ = 0;
  std::shared_ptr<void> hold_;
};

// A request for the longest cached prefix of `keys`.
//
// Everything that the request refers to is borrowed until the result is there. The keyspace's keys
// form a chain: keys[i] is a hash of all tokens up to the end of page i, so that a hit for keys[i]
// is a hit for the whole prefix.
struct AcquireRequest {
  KeyspaceId keyspace;
  uint64_t generation = 0;        // generation of the keyspace, as OpenKeyspace returned it
  std::span<const PageKey> keys;  // keys in prefix order, at most 16,384
  uint32_t first_page = 0;        // position of keys[0] in its sequence
  // key of the page at the last multiple of 32 not behind first_page; unused if first_page is 0
  PageKey run;
  std::optional<TileRange> range;  // layers and heads that a hit needs; absent: all
  // The part of `range` that this process reads itself. The rest of a page may be in `pools` of the
  // engine's other processes, whose slots are not returned. Absent: all of `range`.
  std::optional<TileRange> own;
  // prompt tokens behind the last full page, which crumbd counts in its metrics
  uint32_t window_tokens = 0;
  // Limit of the whole call, including reads of lower tiers.
  Duration timeout = std::chrono::milliseconds(200);
  // If not 0: the lease that another process of the same engine was granted for these keys. crumbd
  // looks nothing up, and this process holds the lease as well from then on. A lease that crumbd
  // does not know is a miss.
  uint64_t lease = 0;
  // If not 0: the epoch of the crumbd that granted `lease`. A restarted crumbd numbers its leases
  // from the start again, so the call fails with kAborted if the client is connected to another
  // epoch.
  uint64_t lease_epoch = 0;
  bool wait_for_lower_tiers = true;  // false: pages outside host memory are misses
  // Verifies the tile checksums of every n-th hit page, starting at an offset that changes from
  // call to call. 1 verifies all pages, 0 none. The header is always verified.
  uint32_t verify_every = 0;
  // Device pools whose pages the caller attends in place; they take precedence over host memory.
  std::vector<PoolId> pools;
  // Pools of this host's other devices, from which the caller can copy.
  std::vector<PoolId> peers;
  bool device_sums = false;  // also return tile checksums of fragments in `pools`
  // If set, fragments in `peers` come without headers and with the checksums of these tiles only,
  // so that the response fits the call socket. An Acquire of the same lease without it returns all.
  std::optional<TileRange> peer_sums;
  // The page before keys[0] was a miss: crumbd looks nothing up and counts the keys as misses.
  bool behind_miss = false;
};

// The result of an Acquire.
struct AcquireResult {
  std::shared_ptr<const Lease> lease;  // null if no page is a hit
  uint64_t lease_id = 0;               // the value for AcquireRequest::lease
  int hit_pages = 0;             // number of leading keys of which all requested tiles are leased
  std::vector<Tier> page_tiers;  // one per hit page
  MissReason miss_reason = MissReason::kNone;  // why the first page behind the hits is a miss
};

// An Acquire that is in flight. Memory that its request refers to must outlive it. Destroying it
// before Finish gives it up: crumbd takes back a lease that it grants. Used by one thread at a
// time.
class PendingAcquire {
 public:
  virtual ~PendingAcquire() = default;
  // Returns true if Finish will not wait for crumbd. Does not block.
  virtual bool Ready() { return true; }
  // Blocks until crumbd has responded, or until the request's timeout since the start. REQUIRES: it
  // is called at most once.
  virtual absl::StatusOr<AcquireResult> Finish() = 0;
};

// The result of a Lookup. All vectors have one element per hit page.
struct LookupResult {
  int hit_pages = 0;
  std::vector<Tier> page_tiers;
  // id of a node that has the hit page; empty: the local crumbd has it
  std::vector<std::string> page_nodes;
  MissReason miss_reason = MissReason::kNone;
};

}  // namespace crumb::client
