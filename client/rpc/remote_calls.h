// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/rpc/connection.h"
#include "client/rpc/connection_keeper.h"
#include "crumb/acquire.h"
#include "crumb/staging.h"

// Acquire, Reserve and Commit over one connection: through its call sockets, or over gRPC if the
// connection has none, another call is in flight there, or the call is too large for it.
namespace crumb::client {

// Sends an Acquire over `connection`, and returns without waiting. `number` identifies the request:
// if its response is lost, the keeper returns the lease that crumbd may have granted. Of the hit
// pages, those with index (page + verify_offset) % verify_every == 0 are verified. See
// Client::StartAcquire.
std::unique_ptr<PendingAcquire> StartRemoteAcquire(const AcquireRequest& request,
                                                   std::shared_ptr<ConnectionKeeper> keeper,
                                                   std::shared_ptr<Connection> connection,
                                                   uint64_t number, uint32_t verify_offset);

// Returns an Acquire that could not be sent; its Finish returns `status`.
std::unique_ptr<PendingAcquire> MakeFailedAcquire(absl::Status status);

// Reserves slots whose room the keeper gives back unless they are committed. Blocks until
// `deadline` at most; room that crumbd grants later is given back. `number` names the call: not 0,
// and another one with each call of the process. See Client::Reserve.
absl::StatusOr<std::vector<StagingSlot>> ReserveRemote(
    int count, size_t fragment_bytes, const PendingPages& pending, uint64_t number,
    TimePoint deadline, const std::shared_ptr<ConnectionKeeper>& keeper,
    const std::shared_ptr<Connection>& connection);

// Sends a Commit and returns without waiting. `note_mark` is called with the flush mark of the
// response, on the thread that finishes the call. Finish returns kAborted if a slot belongs to
// another connection. See Client::StartCommit. REQUIRES: `slots` is not empty, and all of them come
// from ReserveRemote.
std::unique_ptr<PendingCommit> StartRemoteCommit(const KeyspaceId& keyspace,
                                                 std::vector<StagingSlot> slots, size_t tiles_bytes,
                                                 TimePoint deadline,
                                                 std::shared_ptr<Connection> connection,
                                                 std::function<void(uint64_t)> note_mark);

}  // namespace crumb::client
