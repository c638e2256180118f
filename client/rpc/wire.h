// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/cache_stats.h"
#include "crumb/staging.h"
#include "crumb/v1/cache_service.pb.h"

// Conversions between the client's types and crumb.v1 messages.
namespace crumb::client {

std::string ToBytes(const KeyspaceId& keyspace);
// Returns the concatenated keys.
std::string ToBytes(std::span<const PageKey> keys);

v1::TileRange ToWire(const TileRange& range);

// Returns the milliseconds for which crumbd may wait for lower tiers in a call of `timeout`; the
// rest is for the response to travel. Nine tenths of the timeout, at most an hour.
uint32_t WaitMs(Duration timeout);

// kInternal: the number of outcomes is not `expected`.
absl::StatusOr<std::vector<CommitOutcome>> OutcomesOf(
    const google::protobuf::RepeatedField<int>& outcomes, size_t expected);

// kDataLoss: a keyspace id has a wrong size.
absl::StatusOr<CacheStats> StatsOf(const v1::StatsResponse& response);

NodeList NodesOf(const v1::ListNodesResponse& response);

// kDataLoss: an id has a wrong size.
absl::StatusOr<PageLocation> LocationOf(const v1::LocatePageResponse& response);

}  // namespace crumb::client
