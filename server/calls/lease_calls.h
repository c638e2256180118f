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

// Leases the longest prefix for the session's engine and counts the requested tokens once. With
// `lease` set in the request, joins that lease of the engine instead. Misses are in the response: a
// prefix that ends early has a miss reason. kUnauthenticated: the session is closed or has ended;
// kCancelled: the caller gave the request up; kNotFound, kInvalidArgument: the request.
//
// `request` and `response` stay valid until `done`, which is called once, possibly before this
// returns or on a thread of the store. A lease whose response cannot be delivered must be given
// back with Release.
void Acquire(const CallContext& context, std::shared_ptr<Session> session, TimePoint deadline,
             const v1::AcquireRequest& request, v1::AcquireResponse* response, Done done);

// Finds where the longest prefix is, other nodes' pages included; leases nothing, so the pages may
// be gone when the caller acts on the response. `response` stays valid until `done`.
void Lookup(const CallContext& context, TimePoint deadline, const v1::LookupRequest& request,
            v1::LookupResponse* response, Done done);

// Ends holds of leases, releases slots of a device pool, and gives up Acquires by their numbers.
// The response counts leases that the engine does not hold. A disconnected session may call it,
// too.
absl::Status Release(const CallContext& context, Session& session,
                     const v1::ReleaseRequest& request, v1::ReleaseResponse* response);

// Brings pages up, from the SSD and from other nodes, and lets go of them at once. Returns when the
// reads are queued, and waits for none of them. kResourceExhausted: too many prefetches are under
// way.
absl::Status Prefetch(const CallContext& context, const v1::PrefetchRequest& request,
                      v1::PrefetchResponse* response);

}  // namespace crumb::server
