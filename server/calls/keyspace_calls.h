// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Queues the change for every session stream whose tenant owns the keyspace, and for those without
// a tenant. A stream without room for it is counted and misses it.
void NotifySessions(const CallContext& context, const NoticeQueue::StateChange& change);

// Calls `done` at once for a keyspace that is known; else once its record is written. `request` and
// `response` stay valid until `done`, here and below. kInvalidArgument: the fields, the geometry,
// or a tenant that is not the caller's; kResourceExhausted: limits.keyspaces_max or the tenant's
// part of it, or limits.control_queue, is reached.
void OpenKeyspace(const CallContext& context, const v1::OpenKeyspaceRequest& request,
                  v1::OpenKeyspaceResponse* response, Done done);

// Persists the state, then notifies every session stream. kInvalidArgument: a state other than
// active and bf16; kNotFound: no such keyspace of the caller.
void SetKeyspaceState(const CallContext& context, const v1::SetKeyspaceStateRequest& request,
                      Done done);

// Persists the new generation, then deletes the pages. If the deletion fails the call fails, but
// older pages are not served any more.
void DropKeyspace(const CallContext& context, const v1::DropKeyspaceRequest& request,
                  v1::DropKeyspaceResponse* response, Done done);

}  // namespace crumb::server
