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
#include "common/fragment_header_view.h"
#include "common/page_key.h"

namespace crumb::client {

// Where a page was found. Values are those of the wire.
enum class Tier { kUnknown = 0, kDevice = 1, kHost = 2, kSsd = 3, kRemote = 4 };

std::string_view TierName(Tier tier);

// Why a page was not served. Values up to kBusy are those of the wire.
enum class MissReason {
  kNone = 0,          // it was
  kAbsent = 1,        // nobody committed it, or it was evicted
  kPending = 2,       // somebody is committing it
  kDeadline = 3,      // not brought up in time
  kCorrupt = 4,       // header or sums differ: the copy is not used
  kGeneration = 5,    // of a dropped generation of the keyspace
  kQuality = 6,       // the keyspace is served in BF16 only
  kNotCovered = 7,    // not all layers and heads are there
  kBusy = 8,          // no room to bring it up, or the lease budget is spent
  kUnavailable = 64,  // no crumbd, or it did not answer
};

std::string_view MissReasonName(MissReason reason);

// Names a device in every process and container of the host.
struct DeviceUuid {
  std::array<uint8_t, 16> bytes{};

  std::string ToBytes() const { return {reinterpret_cast<const char*>(bytes.data()), 16}; }
  friend bool operator==(const DeviceUuid&, const DeviceUuid&) = default;
};

// Names a pool of device memory; random, chosen by crumbd, and kept when crumbd restarts.
struct PoolId {
  std::array<uint8_t, 16> bytes{};

  std::string ToBytes() const { return {reinterpret_cast<const char*>(bytes.data()), 16}; }
  // Zeros unless `text` has 16 bytes.
  static PoolId FromBytes(std::string_view text) {
    PoolId id;
    if (text.size() == id.bytes.size()) std::memcpy(id.bytes.data(), text.data(), text.size());
    return id;
  }
  friend bool operator==(const PoolId&, const PoolId&) = default;
};

// A fragment that lies in a slot of a device pool. A slot holds tiles only; the header is crumbd's.
// What it points to is valid while its lease lives.
struct DeviceFragment {
  int page = 0;  // index into the keys of the Acquire
  PoolId pool;
  uint64_t slot = 0;
  // What fragments of one shape have in common: all but key, parent, position and tile sums.
  const FragmentHeader* shape = nullptr;
  // Only where they were asked for, and of peers: the header as EncodeFragmentHeader writes it, and
  // the tile sums in it. With AcquireRequest::peer_sums no header, and the sums of those tiles.
  std::span<const std::byte> header;
  std::span<const uint32_t> tile_sums;
};

// One fragment in crumbd's shared memory. Its header was decoded and compared with what was asked
// for; its tiles were not read yet.
struct LeasedFragment {
  int page = 0;           // index into the keys of the Acquire
  FragmentHeader header;  // without tile sums
  // Valid while the lease lives, layer by layer, head by head:
  std::span<const uint32_t> tile_sums;
  std::span<const std::byte> tiles;

  // kDataLoss naming the first tile whose checksum differs. Reads every byte.
  absl::Status VerifyTiles() const { return VerifyTileSums(header, tile_sums, tiles); }
};

// Pages that stay where they are until this is destroyed. Outlives the connection it came over:
// when crumbd dies the memory stays mapped. Thread-safe once made. Must not outlive its Client.
class Lease {
 public:
  // `hold` keeps the memory mapped and ends the lease when its last reference goes; `told` keeps
  // what device fragments point to; `epoch` is that of the crumbd that gave the lease.
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

  // In host memory; by page, ascending.
  std::span<const LeasedFragment> fragments() const { return fragments_; }
  // In device pools that the Acquire named; by page, ascending.
  std::span<const DeviceFragment> device_fragments() const { return device_fragments_; }
  // Keeps what they point to when the lease has ended, too.
  const std::shared_ptr<const void>& device_store() const { return device_store_; }
  // Of the crumbd that gave it: the next one knows of no slot that only this lease holds.
  uint64_t epoch() const { return epoch_; }

 private:
  std::vector<LeasedFragment> fragments_;
  std::vector<DeviceFragment> device_fragments_;
  std::shared_ptr<const void> device_store_;
  uint64_t epoch_ = 0;
  std::shared_ptr<void> hold_;
};

// A prefix to look for.
struct AcquireRequest {
  KeyspaceId keyspace;
  uint64_t generation = 0;        // of the keyspace, as OpenKeyspace answered it
  std::span<const PageKey> keys;  // in prefix order, 16,384 at most
  uint32_t first_page = 0;        // position of keys[0] in its sequence
  PageKey run;  // the page at the last multiple of 32 at or before it; for first_page 0 not needed
  std::optional<TileRange> range;  // absent: all layers and heads
  // What of `range` this process reads itself: the rest of a page may be in `pools` of the engine's
  // other processes, whose places are not told. Absent: all of it.
  std::optional<TileRange> own;
  uint32_t window_tokens = 0;  // tokens of the prompt that no key stands for, for crumbd's metrics
  Duration timeout = std::chrono::milliseconds(200);  // of the call, lower tiers included
  // Not 0: the lease that another process of the same engine got for these keys. Nothing is looked
  // for; this process holds the lease too from now on. Unknown to crumbd: a miss.
  uint64_t lease = 0;
  // Not 0: the epoch of the crumbd that gave `lease`. Another crumbd numbers its leases from the
  // start again, so the call fails with kAborted if the client is connected to another one by now.
  uint64_t lease_epoch = 0;
  bool wait_for_lower_tiers = true;  // false: only what host memory holds
  // Checks the tile sums of every n-th hit page, beginning with one that changes from call to call;
  // 1: of all; 0: of none. The header is always checked.
  uint32_t verify_every = 0;
  // Device pools whose pages are attended in place, before those in host memory. Empty: none are
  // looked for.
  std::vector<PoolId> pools;
  // Pools of other devices of this host that this process can copy from.
  std::vector<PoolId> peers;
  bool device_sums = false;  // tile sums of fragments in `pools`, too
  // Of fragments in `peers` no headers, but the sums of these tiles: what is told fits where
  // answers are quick. An Acquire of the lease without it tells all.
  std::optional<TileRange> peer_sums;
  // The page before keys[0] was no hit: nothing is looked for, the keys are counted as misses.
  bool behind_miss = false;
};

struct AcquireResult {
  std::shared_ptr<const Lease> lease;          // null when nothing hit
  uint64_t lease_id = 0;                       // what AcquireRequest::lease names it by
  int hit_pages = 0;                           // leading keys whose tiles are all here
  std::vector<Tier> page_tiers;                // of the hit pages
  MissReason miss_reason = MissReason::kNone;  // of the first page that is not a hit
};

// An Acquire that is under way. Destroyed before it was finished it is given up: a lease that it is
// granted is given back. One thread at a time.
class PendingAcquire {
 public:
  virtual ~PendingAcquire() = default;
  // Whether Finish will not wait for an answer. Does not block.
  virtual bool Ready() { return true; }
  // Blocks until the answer, or the request's timeout since the start. Once.
  virtual absl::StatusOr<AcquireResult> Finish() = 0;
};

struct LookupResult {
  int hit_pages = 0;
  std::vector<Tier> page_tiers;
  std::vector<std::string> page_nodes;  // of the hit pages: id of a node that has it; empty: crumbd
  MissReason miss_reason = MissReason::kNone;
};

}  // namespace crumb::client
