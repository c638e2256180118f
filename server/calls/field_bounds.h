// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "server/base/limits.h"

namespace crumb::server {

// Bounds on the size of every request, of clients and of other nodes. A message may have 4 MiB,
// which is room for more numbers or names than any call can mean; so each field that can grow has a
// bound of its own, and a request that passes one is refused before any work is done for it. The
// table is in field_bounds.cc; a test compares it with the messages of all services.
//
// CacheService::Admit and PeerService::Admit check the request of each call. The functions in
// server/calls check theirs, too, because Acquires also come over the sessions' own sockets.
//
// The parts of keyspaces' records, which nodes exchange, may be as long as a message: the registry
// refuses a record that is too large (keyspace_merge.h) without refusing those beside it.

// gRPC's default, which crumbd sets explicitly: a Commit, an Acquire and a chunk of a Put fit.
inline constexpr int kMessageBytesMax = 4 << 20;

// How much of a field a request may have.
struct FieldBound {
  std::string_view field;   // its full name, "crumb.v1.AcquireRequest.keys"
  uint64_t count = 1;       // elements of a repeated field or a map
  uint64_t bytes = 0;       // limit of each element that is a string or bytes
  std::string_view key;     // the setting that the bound follows; empty: it is fixed
  uint64_t item_bytes = 1;  // a field that is a list of items of so many bytes is counted in them
};

// The bound of a field; none: the table has no such field.
std::optional<FieldBound> BoundOf(std::string_view field, const Limits& limits);

// kInvalidArgument naming the first field that is longer than its bound, and the bound. Looks into
// messages within the message.
absl::Status CheckFields(const Limits& limits, const google::protobuf::Message& request);

// kInvalidArgument: a call about no fragment, or about more than limits.commit_fragments_max.
absl::Status CheckCount(const Limits& limits, const char* field, uint64_t count);

}  // namespace crumb::server
