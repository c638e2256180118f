// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// kFailedPrecondition: the session has no staging memory.
absl::Status Reserve(const CallContext& context, const Session& session,
                     const v1::ReserveRequest& request, v1::ReserveResponse* response);

// CommitHere says whether a Commit may copy and check on the calling thread. kIfSmall: it does if
// the fragments together have at most 2 MiB, the amount that the commit threads process for one
// tenant before they serve the next. This saves waking another thread, and takes no place in
// limits.commit_queue.
enum class CommitHere : uint8_t { kNever, kIfSmall };

// Frees every reservation that the request names, whatever comes of it, unless `reserves` does not
// fit. `response` stays valid until `done`. kInvalidArgument: an offset is not reserved, or arrays
// differ in length.
void Commit(const CallContext& context, const Session& session, const v1::CommitRequest& request,
            v1::CommitResponse* response, Done done, CommitHere here = CommitHere::kNever);

absl::Status Abort(const CallContext& context, const Session& session,
                   const v1::AbortRequest& request);

// Releases the reservations of a Reserve, with the number `request`, whose response its caller does
// not get.
void WithdrawReserve(const Session& session, uint64_t request, const v1::ReserveResponse& response);

// Commits one fragment: checks it against the keyspace and passes it to the store. CPU work only.
// `why` is set if the outcome is REFUSED or NO_ROOM. `notices`, unless null, is notified when the
// fragment is durable, also if another commit stored it.
v1::CommitOutcome CommitFragment(const CallContext& context, const Keyspace& keyspace,
                                 std::span<const std::byte> fragment, uint32_t tiles_bytes,
                                 const std::shared_ptr<NoticeQueue>& notices, std::string* why);

}  // namespace crumb::server
