// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/device_fragment.h"
#include "crumb/lease.h"
#include "crumb/miss_reason.h"
#include "crumb/tier.h"

namespace crumb::client {

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
