// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "client/rpc/connection.h"
#include "client/rpc/connection_keeper.h"
#include "crumb/acquire.h"

namespace crumb::client {

// Sends an Acquire over `connection`, through its call socket if the response will be small, and
// returns without waiting. `number` identifies the request: if its response is lost, the keeper
// returns the lease that crumbd may have granted. Of the hit pages, those with index
// (page + verify_offset) % verify_every == 0 are verified. See Client::StartAcquire.
std::unique_ptr<PendingAcquire> StartRemoteAcquire(const AcquireRequest& request,
                                                   std::shared_ptr<ConnectionKeeper> keeper,
                                                   std::shared_ptr<Connection> connection,
                                                   uint64_t number, uint32_t verify_offset);

// Returns an Acquire that could not be sent; its Finish returns `status`.
std::unique_ptr<PendingAcquire> MakeFailedAcquire(absl::Status status);

}  // namespace crumb::client
