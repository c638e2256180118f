// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/metrics.h"

namespace crumb::server {

// Why a page was not given to one of its homes, for good. It is here; a home that lacks it costs a
// miss. Labels of crumb_push_dropped_pages_total.
enum class PushDrop : uint8_t {
  kQueueFull,   // cluster.push_queue_pages
  kAlone,       // the limit was reached while no other node was in the view
  kUnplaced,    // no run could be found for it
  kUnread,      // draining: the store did not give it in time, or has not all of it
  kNodeGone,    // the home left, and so did those that took its place
  kBreaker,     // the home was silent before, and nothing was sent to it
  kSilent,      // the home did not respond
  kRefused,     // the home responded with an error
  kBusy,        // the home was at a bound, or has no room
  kLate,        // the home could not fetch it in time
  kAbsent,      // this node did not have it any more, or could not be reached for it
  kCorrupt,     // the page that the home fetched was damaged
  kGeneration,  // its keyspace was dropped
  kStopped,     // this node stopped first
};
inline constexpr size_t kPushDropCount = 14;

// Returns the label's value.
const char* PushDropName(PushDrop reason);

// Counters of the cluster's parts, in the order of the page's way: look for it elsewhere, push it,
// serve it. The cluster owns the only one; its parts add, the exporter reads. Thread-safe.
struct ClusterMetrics {
  // Looking at other nodes.
  Counter pulls;                  // requests that were sent to other nodes
  Counter finds;                  // requests to other nodes that only locate pages
  Counter pulls_refused;          // over cluster.pulls_max
  Counter pulls_late;             // ended by the deadline
  Counter pull_acquires;          // PeerAcquire calls
  Counter pull_acquire_failures;  // pull acquires that failed
  Counter pulled_pages;           // arrived and verified
  Counter pull_coalesced_pages;   // another request was fetching them already
  Counter pull_failed_pages;      // found but did not arrive
  Counter pull_corrupt_pages;     // arrived, but not as requested
  Counter pulled_bytes;
  Counter breaker_skips;  // requests not sent: the node's breaker was open
  Counter referred_runs;  // runs that a home referred this node to another node for

  // Giving pages to their homes.
  Counter push_offered_pages;
  Counter push_stored_pages;                         // homes took them
  Counter push_known_pages;                          // homes had them
  Counter push_noted_pages;                          // homes noted that this node has them
  Counter push_retried_pages;                        // an offer failed and is made again
  std::array<Counter, kPushDropCount> push_dropped;  // indexed by PushDrop

  // Serving other nodes.
  Counter served_acquires;
  Counter served_pages;
  Counter served_bytes;    // over gRPC; the transport counts its own
  Counter serve_refused;   // no session, or not its keyspace
  Counter received_pages;  // pushed to this node
  // The directory of holders, which this node has as a home of runs.
  Counter noted_pages;      // offered and not fetched
  Counter referrals_given;  // runs that a node was referred to others for
  // Holders that lacked the pages that they were named for in a referral.
  Counter holders_forgotten;
  // Requests refused because one other node exceeded its limits.
  Counter peer_leases_refused;
  Counter peer_reads_refused;
  Counter peer_pushes_refused;
  Counter peer_leases_reaped;

  // Membership.
  Counter view_changes;
  Counter nodes_refused;
  Counter etcd_failures;
  Counter keyspace_merges;           // changes that came from other nodes
  Counter record_exchanges;          // PeerKeyspaces calls
  Counter record_exchange_failures;  // exchanges of which no record was taken over
  Counter records_refused;           // keyspace records of other nodes that were not taken over
};

}  // namespace crumb::server
