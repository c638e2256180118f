// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

absl::Status Unpin(const CallContext& context, const v1::UnpinRequest& request,
                   v1::UnpinResponse* response);

// `response` stays valid until `done`.
// Pages that other nodes have are brought here first, if the request may wait.
void Pin(const CallContext& context, TimePoint deadline, const v1::PinRequest& request,
         v1::PinResponse* response, Done done);
void Delete(const CallContext& context, const v1::DeleteRequest& request,
            v1::DeleteResponse* response, Done done);
void Flush(const CallContext& context, const v1::FlushRequest& request, v1::FlushResponse* response,
           Done done);

}  // namespace crumb::server
