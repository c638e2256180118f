// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Ends the pins of pages. The response counts those that were pinned.
absl::Status Unpin(const CallContext& context, const v1::UnpinRequest& request,
                   v1::UnpinResponse* response);

// Keeps pages from eviction for ttl_ms. Pages that other nodes have are brought here first, if the
// request may wait (wait_ms). kInvalidArgument: ttl_ms is 0 or beyond limits.pin_max;
// kResourceExhausted: the tenant has its part of the memory that may be kept, and the pages before
// are pinned. `response` stays valid until `done`.
void Pin(const CallContext& context, TimePoint deadline, const v1::PinRequest& request,
         v1::PinResponse* response, Done done);
// Removes pages from all tiers of this node and has the cluster note the deletion for other nodes.
// Runs on the control executor. `response` stays valid until `done`.
void Delete(const CallContext& context, const v1::DeleteRequest& request,
            v1::DeleteResponse* response, Done done);
// Makes the pages in the caller's scope durable (FlushScopeOf) and calls `done` when they are,
// possibly before this returns or on a thread of the store. With `report` the numbers of pages that
// are not durable are in the response only; without it such a page makes the call fail. `response`
// stays valid until `done`.
void Flush(const CallContext& context, const v1::FlushRequest& request, v1::FlushResponse* response,
           Done done);

}  // namespace crumb::server
