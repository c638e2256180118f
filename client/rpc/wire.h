// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/cache_stats.h"
#include "crumb/staging.h"
#include "crumb/v1/cache_service.pb.h"

// The client's types to and from crumb.v1 messages.
namespace crumb::client {

std::string ToBytes(const KeyspaceId& keyspace);
// Keys one after the other.
std::string ToBytes(std::span<const PageKey> keys);

v1::TileRange ToWire(const TileRange& range);

// kInternal: not as many as `expected`.
absl::StatusOr<std::vector<CommitOutcome>> OutcomesOf(
    const google::protobuf::RepeatedField<int>& outcomes, size_t expected);

// kDataLoss: a keyspace id of a wrong size.
absl::StatusOr<CacheStats> StatsOf(const v1::StatsResponse& response);

NodeList NodesOf(const v1::ListNodesResponse& response);

// kDataLoss: an id of a wrong size.
absl::StatusOr<PageLocation> PlaceOf(const v1::LocatePageResponse& response);

}  // namespace crumb::client
