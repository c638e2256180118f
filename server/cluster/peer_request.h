// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cluster/peer_calls.h"

// Fields that requests of other nodes have in common, checked.
namespace crumb::server {

// Decodes page keys. kInvalidArgument: there is none, there are more than `keys_max`, or the last
// one is not whole.
absl::StatusOr<std::vector<PageKey>> KeysOf(const std::string& bytes, size_t keys_max);

absl::StatusOr<TileRange> RangeOf(const Keyspace& keyspace, const v1::TileRange& range);

// Returns the budget that a call counts against: its node's, or the empty name for all nodes
// together that are not in the view, because those might have any name.
std::string BudgetOf(const PeerCallContext& context, const v1::PeerCaller& caller);

}  // namespace crumb::server
