// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/rpc/connection.h"
#include "client/rpc/connection_keeper.h"
#include "crumb/staging.h"

// Reserve and Commit over one connection: through its staging socket, or over gRPC if the
// connection has none, another call is in flight there, or the call is too large for it.
namespace crumb::client {

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
