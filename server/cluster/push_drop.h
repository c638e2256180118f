// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::server {

// Why a page was not given to one of its homes, for good. It is here; a home that lacks it costs a
// miss. Labels of crumb_push_dropped_pages_total.
enum class PushDrop : uint8_t {
  kQueueFull,   // cluster.push_queue_pages
  kAlone,       // as many were committed while no other node was in the view
  kUnplaced,    // no run could be found for it
  kUnread,      // draining: the store did not give it in time, or has not all of it
  kNodeGone,    // the home left, and so did those that took its place
  kBreaker,     // the home was silent before, and was not asked
  kSilent,      // the home did not answer
  kRefused,     // the home's answer was an error
  kBusy,        // the home was at a bound, or has no room
  kLate,        // the home could not fetch it in time
  kAbsent,      // this node did not have it any more, or could not be reached for it
  kCorrupt,     // what the home fetched was damaged
  kGeneration,  // its keyspace was dropped
  kStopped,     // this node stopped first
};
inline constexpr size_t kPushDropCount = 14;

const char* PushDropName(PushDrop reason);

}  // namespace crumb::server
