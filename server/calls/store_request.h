// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "common/status_macros.h"
#include "crumb/v1/page.pb.h"
#include "server/calls/call_context.h"
#include "server/calls/cluster_acquire.h"

namespace crumb::server {

// Returns the range of a request's message. kInvalidArgument: it is empty or out of the keyspace's
// bounds.
inline absl::StatusOr<TileRange> ReadRange(const Keyspace& keyspace, const v1::TileRange& range) {
  return keyspace.CheckRange(range.layer_begin(), range.layer_end(), range.head_begin(),
                             range.head_end());
}

// A request for keys, to the store and to other nodes. `wanted` is the store's part of it.
template <typename Request>
ClusterAcquireRequest MakeClusterRequest(std::shared_ptr<Keyspace> keyspace,
                                         storage::AcquireRequest wanted, const Request& request) {
  ClusterAcquireRequest made;
  made.keyspace = std::move(keyspace);
  made.wanted = std::move(wanted);
  made.first_page = request.first_page();
  made.run = PageKey::FromBytes(request.run()).value_or(PageKey());
  if constexpr (requires { request.everyone(); }) made.everyone = request.everyone();
  return made;
}

// Returns the store's request for a message with the fields keys and, maybe, range.
template <typename Request>
absl::StatusOr<storage::AcquireRequest> MakeStoreRequest(const CallContext& context,
                                                         const Keyspace& keyspace,
                                                         const Request& request, uint64_t wait_ms,
                                                         TimePoint deadline) {
  storage::AcquireRequest wanted;
  wanted.keyspace = keyspace.id;
  wanted.generation = keyspace.generation.load();
  CRUMB_ASSIGN_OR_RETURN(wanted.keys, ReadKeys(context, request.keys()));
  wanted.range = keyspace.geometry.all_tiles();
  if constexpr (requires { request.has_range(); }) {
    if (request.has_range()) {
      CRUMB_ASSIGN_OR_RETURN(wanted.range, ReadRange(keyspace, request.range()));
    }
  }
  wanted.deadline = WaitUntil(context, wait_ms, deadline);
  wanted.fragments_max = static_cast<size_t>(context.limits.response_fragments_max);
  wanted.within_part = true;
  return wanted;
}

}  // namespace crumb::server
