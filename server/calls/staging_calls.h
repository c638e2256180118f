// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Reserves room in the session's staging memory, or blank slots if the request names a device pool.
// The response has fewer offsets than requested if there is no room for more. Does not block.
// kUnauthenticated: the session is closed; kFailedPrecondition: it has no staging memory;
// kInvalidArgument: count or fragment_bytes is 0 or beyond its limit.
absl::Status Reserve(const CallContext& context, const Session& session,
                     const v1::ReserveRequest& request, v1::ReserveResponse* response);

// CommitHere says whether a Commit may copy and check on the calling thread. kIfSmall: it does if
// the fragments together have at most 2 MiB, the amount that the commit threads process for one
// tenant before they serve the next. This saves waking another thread, and takes no place in
// limits.commit_queue.
enum class CommitHere : uint8_t { kNever, kIfSmall };

// Commits the fragments in reservations of the session, or in slots if the request names a device
// pool. The response has an outcome for each. Frees every reservation that the request names,
// whatever comes of it, unless the request exceeds a bound or `reserves` does not fit. `response`
// stays valid until `done`, which is called once, on a commit thread or before this returns.
// kInvalidArgument: an offset is not reserved, or arrays differ in length; kResourceExhausted:
// limits.commit_queue is reached.
void Commit(const CallContext& context, const Session& session, const v1::CommitRequest& request,
            v1::CommitResponse* response, Done done, CommitHere here = CommitHere::kNever);

// Frees reservations without a commit, by their offsets or by the numbers of Reserves whose
// responses were lost. kInvalidArgument: some offsets are not reserved; the others are freed.
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
