// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crumb::storage {

// A copy of a Histogram's state.
struct HistogramSnapshot {
  std::vector<double> bounds;
  std::vector<uint64_t> counts;  // bounds.size() + 1
  double sum = 0;
};

// Evicted pages by reason.
struct EvictionCounts {
  uint64_t capacity = 0;  // room was needed
  uint64_t ancestor = 0;  // its parent went
  uint64_t deleted = 0;   // a caller deleted it
  uint64_t corrupt = 0;
};

struct TierStats {
  uint64_t capacity_bytes = 0;
  uint64_t resident_bytes = 0;          // slots in use
  uint64_t resident_logical_bytes = 0;  // size of the same tiles in BF16
  uint64_t pages = 0;
  uint64_t waste_bytes = 0;  // rounding and unusable ends of slabs
  uint64_t logical_put_bytes = 0;
  uint64_t stored_put_bytes = 0;
  uint64_t logical_get_bytes = 0;
  uint64_t stored_get_bytes = 0;
  EvictionCounts evicted;
  HistogramSnapshot page_lifetime_seconds;
  HistogramSnapshot reuse_gap_seconds;
  std::string state = "active";  // "active", "off: <reason>" or "read-only: <reason>"
};

// Device pools.
struct DevicePoolStats {
  uint64_t pools = 0;
  uint64_t handles = 0;
  uint64_t free_slots = 0;
  uint64_t blank_slots = 0;    // slots that processes hold and that have no page
  uint64_t held_slots = 0;     // slots that processes hold, blank or with a page
  uint64_t unknown_slots = 0;  // slots of an earlier crumbd's pools that no process has claimed yet
  uint64_t demoting_slots = 0;
  uint64_t demoted_slots = 0;  // ever copied down before their pages left
  uint64_t dropped_slots = 0;  // ever left with no copy below
};

struct StoreStats {
  TierStats device;
  DevicePoolStats pools;
  TierStats host;
  TierStats ssd;
  uint64_t leases = 0;
  uint64_t leased_slots = 0;
  uint64_t held_bytes = 0;            // bytes that leases, reads and pins hold, if bounded
  uint64_t slabs_owned = 0;           // slabs that a tenant, or all together, own
  uint64_t slabs_closing = 0;         // slabs whose pages leave for another tenant
  uint64_t slabs_gone = 0;            // empty, and maybe mapped still by those who had them
  uint64_t slab_moves = 0;            // moves from one tenant to another
  uint64_t slabs_kept = 0;            // given up after a takeover, and kept by processes
  uint64_t slabs_revoked = 0;         // taken from processes that did not let them go
  uint64_t slab_renewals_failed = 0;  // failures to allocate a new file
  uint64_t slab_pinned_checks = 0;    // checks that found pinned pages in a slab
  double oldest_lease_seconds = 0;
  uint64_t durable_pages = 0;
  uint64_t dedup_bytes = 0;
  uint64_t write_queue_pages = 0;
  uint64_t write_queue_dropped = 0;
  uint64_t pending_forgotten = 0;  // announced pages that were forgotten: there were too many
  uint64_t lost_pages = 0;  // left host memory before they were durable, though that was owed
  uint64_t admission_rejected = 0;
  uint64_t promoted_pages = 0;
  uint64_t ssd_reads_refused = 0;  // too many waited, of all tenants or of one
  uint64_t demoted_pages = 0;
  uint64_t verify_failures_commit = 0;
  uint64_t verify_failures_ssd = 0;
  uint64_t verify_failures_device = 0;  // pages that workers found damaged in device pools
  uint64_t recovered_pages = 0;
  uint64_t discarded_pages = 0;  // pages that recovery discarded
  double recovery_seconds = 0;
};

}  // namespace crumb::storage
