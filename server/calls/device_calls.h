// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

// The RPCs about device pools.
namespace crumb::server {

// Slots of a lost session that one call releases at most: a megabyte of numbers, and more than a
// device has slots.
inline constexpr int64_t kKeptSlotsMax = 262'144;

// Gives the session blank slots, up to as many as it requests; fewer, or none, if the pool is full.
// kUnavailable: an earlier numbered call is still being served (DevicePools::Reserve). Errors of
// all functions here: kInvalidArgument if the session takes part in no such pool or the arrays of
// the request differ in length.
absl::Status ReserveSlots(const CallContext& context, const Session& session,
                          const v1::ReserveRequest& request, v1::ReserveResponse* response);

// Makes fragments in blank slots of the session visible. The response has an outcome for each slot
// and the first reason of a refusal; the call itself fails only if the request is wrong. Pages lie
// in device memory, so crumbd checks their headers but not their bytes.
absl::Status CommitSlots(const CallContext& context, const Session& session,
                         const v1::CommitRequest& request, v1::CommitResponse* response);

// Lets go of slots, and of slots that were to be copied (demoted). With all_but_slots, releases
// everything that the session holds except the slots named: the process has another session.
// kInvalidArgument: some are not held by the session; the others are released.
absl::Status ReleaseSlots(const CallContext& context, const Session& session,
                          const v1::ReleaseRequest& request);

// Gives a process the slots back that it held before this crumbd started, with their pages.
// kFailedPrecondition: the pool is not recovering; kAborted: the process has another session.
absl::Status ClaimSlots(const CallContext& context, const Session& session,
                        const v1::ClaimSlotsRequest& request, v1::ClaimSlotsResponse* response);

// Returns headers of slots, as many as limits.device_sums_bytes_max has room for, and takes pages
// out of the pool that were found damaged. Each slot may be named once. Encoding the headers takes
// time: callers run this on an executor.
absl::Status ScrubSlots(const CallContext& context, const Session& session,
                        const v1::ScrubSlotsRequest& request, v1::ScrubSlotsResponse* response);

// kInvalidArgument: the request names more pools than device_pools.named_max.
absl::Status CheckNamedPools(const CallContext& context, const v1::AcquireRequest& request);

// The pools whose pages count for an Acquire of the session, the best first: those the request
// names, then those of the engine's other processes, no more than device_pools.named_max together.
// REQUIRES: CheckNamedPools.
std::vector<storage::DevicePoolNumber> PoolsOf(const CallContext& context, const Session& session,
                                               const v1::AcquireRequest& request);

// Fills in the places of fragments in pools that the request names; its peer_sums are a range of
// the keyspace's. Headers beyond limits.device_sums_bytes_max are left out: such fragments cannot
// be copied.
void FillDeviceFragments(const CallContext& context, const Session& session,
                         const v1::AcquireRequest& request,
                         const std::vector<storage::DeviceFragmentRef>& found,
                         v1::DeviceFragments* fragments);

// Returns the header in its encoded form.
std::string ToBytes(const FragmentHeader& header);

}  // namespace crumb::server
