// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "crumb/v1/cache_service.pb.h"
#include "server/base/wire_enums.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Leases the longest prefix for the session's engine and counts the requested tokens once.
// `request` and `response` stay valid until `done`. A lease whose response cannot be delivered must
// be given back with Release.
void Acquire(const CallContext& context, std::shared_ptr<Session> session, TimePoint deadline,
             const v1::AcquireRequest& request, v1::AcquireResponse* response, Done done);

// Finds where the longest prefix is, other nodes' pages included. `response` stays valid until
// `done`.
void Lookup(const CallContext& context, TimePoint deadline, const v1::LookupRequest& request,
            v1::LookupResponse* response, Done done);

absl::Status Release(const CallContext& context, Session& session,
                     const v1::ReleaseRequest& request, v1::ReleaseResponse* response);

// Brings pages up, from the SSD and from other nodes, and lets go of them at once. Waits for
// nothing.
absl::Status Prefetch(const CallContext& context, const v1::PrefetchRequest& request,
                      v1::PrefetchResponse* response);

}  // namespace crumb::server
