// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Sends the change to every session stream.
void NotifySessions(const CallContext& context, const NoticeQueue::StateChange& change);

// Calls `done` at once for a keyspace that is known; else once its record is written. `request` and
// `response` stay valid until `done`, here and below.
void OpenKeyspace(const CallContext& context, const v1::OpenKeyspaceRequest& request,
                  v1::OpenKeyspaceResponse* response, Done done);

// Persists the state, then notifies every session stream.
void SetKeyspaceState(const CallContext& context, const v1::SetKeyspaceStateRequest& request,
                      Done done);

// Persists the new generation, then deletes the pages.
void DropKeyspace(const CallContext& context, const v1::DropKeyspaceRequest& request,
                  v1::DropKeyspaceResponse* response, Done done);

}  // namespace crumb::server
