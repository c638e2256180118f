// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "crumb/v1/peer_service.grpc.pb.h"
#include "server/base/outgoing_calls.h"
#include "transport/fetch.h"

namespace crumb::server {

// Fetches pages as gRPC bytes, with the meaning of transport::Transport::Fetch, for nodes that no
// faster transport connects. All wishes have the same range. `done` runs on a gRPC thread.
void StartGrpcFetch(const std::shared_ptr<v1::PeerService::Stub>& stub,
                    const std::shared_ptr<OutgoingCalls>& calls, const Clock& clock,
                    transport::FetchRequest request, transport::FetchDone done);

}  // namespace crumb::server
