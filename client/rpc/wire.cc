// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/wire.h"

#include <algorithm>
#include <chrono>

#include "common/status_macros.h"

namespace crumb::client {

static_assert(sizeof(PageKey) == sizeof(Digest));

namespace {

// Returns an id of a response. kDataLoss: it has a wrong size.
template <class Id>
absl::StatusOr<Id> IdOf(std::string_view bytes) {
  absl::StatusOr<Id> id = Id::FromBytes(bytes);
  if (id.ok()) return id;
  return absl::DataLossError("crumbd's response is damaged: " + std::string(id.status().message()));
}

}  // namespace

std::string ToBytes(const KeyspaceId& keyspace) { return std::string(keyspace.view()); }

std::string ToBytes(std::span<const PageKey> keys) {
  return std::string(reinterpret_cast<const char*>(keys.data()), keys.size_bytes());
}

v1::TileRange ToWire(const TileRange& range) {
  v1::TileRange wire;
  wire.set_layer_begin(range.layers.begin);
  wire.set_layer_end(range.layers.end);
  wire.set_head_begin(range.heads.begin);
  wire.set_head_end(range.heads.end);
  return wire;
}

uint32_t WaitMs(Duration timeout) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout * 9 / 10).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(ms, 0, 3'600'000));
}

absl::StatusOr<std::vector<CommitOutcome>> OutcomesOf(
    const google::protobuf::RepeatedField<int>& outcomes, size_t expected) {
  if (static_cast<size_t>(outcomes.size()) != expected) {
    return absl::InternalError("crumbd returned " + std::to_string(outcomes.size()) +
                               " outcomes for " + std::to_string(expected) + " fragments");
  }
  std::vector<CommitOutcome> result;
  for (const int outcome : outcomes) result.push_back(static_cast<CommitOutcome>(outcome));
  return result;
}

absl::StatusOr<CacheStats> StatsOf(const v1::StatsResponse& response) {
  CacheStats stats;
  stats.version = response.version();
  stats.node_id = response.node_id();
  stats.uptime_seconds = response.uptime_seconds();
  for (const v1::StatsResponse::TierStats& tier : response.tiers()) {
    stats.tiers.push_back({.tier = static_cast<Tier>(tier.tier()),
                           .capacity_bytes = tier.capacity_bytes(),
                           .resident_bytes = tier.resident_bytes(),
                           .resident_logical_bytes = tier.resident_logical_bytes(),
                           .pages = tier.pages(),
                           .evicted_pages = tier.evicted_pages(),
                           .state = tier.state()});
  }
  for (const v1::StatsResponse::KeyspaceStats& keyspace : response.keyspaces()) {
    CacheStats::KeyspaceStats& out = stats.keyspaces.emplace_back();
    CRUMB_ASSIGN_OR_RETURN(out.id, IdOf<KeyspaceId>(keyspace.keyspace()));
    out.model = keyspace.model();
    out.generation = keyspace.generation();
    out.state = static_cast<KeyspaceState>(keyspace.state());
    out.state_reason = keyspace.state_reason();
  }
  stats.sessions = response.sessions();
  stats.leases = response.leases();
  stats.reservations = response.reservations();
  stats.lookup_tokens.insert(response.lookup_tokens().begin(), response.lookup_tokens().end());
  stats.counters.insert(response.counters().begin(), response.counters().end());
  return stats;
}

NodeList NodesOf(const v1::ListNodesResponse& response) {
  NodeList list;
  for (const v1::ListNodesResponse::Node& node : response.nodes()) {
    list.nodes.push_back({.id = node.id(),
                          .address = node.address(),
                          .version = node.version(),
                          .self = node.self(),
                          .state = node.state(),
                          .up = node.up(),
                          .weight = node.weight(),
                          .host = node.host(),
                          .zone = node.zone(),
                          .capacity_bytes = node.capacity_bytes(),
                          .transport = node.transport(),
                          .breaker = node.breaker(),
                          .pages_to_push = node.pages_to_push()});
  }
  list.view_epoch = response.view_epoch();
  list.previous_epoch = response.previous_epoch();
  list.refused = {response.refused().begin(), response.refused().end()};
  list.trouble = response.trouble();
  return list;
}

absl::StatusOr<PageLocation> LocationOf(const v1::LocatePageResponse& response) {
  PageLocation place;
  CRUMB_ASSIGN_OR_RETURN(place.keyspace, IdOf<KeyspaceId>(response.keyspace()));
  if (!response.run().empty()) {
    CRUMB_ASSIGN_OR_RETURN(place.run, IdOf<PageKey>(response.run()));
  }
  place.homes = {response.homes().begin(), response.homes().end()};
  place.previous_homes = {response.previous_homes().begin(), response.previous_homes().end()};
  place.holders = {response.holders().begin(), response.holders().end()};
  place.silent = {response.silent().begin(), response.silent().end()};
  return place;
}

}  // namespace crumb::client
