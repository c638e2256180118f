// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/status_calls.h"

#include "server/base/wire_enums.h"
#include "server/calls/keyspace_calls.h"
#include "server/cluster/cluster.h"
#include "server/metrics/counter_list.h"

namespace crumb::server {
namespace {

void FillTier(v1::Tier tier, const storage::TierStats& stats,
              v1::StatsResponse::TierStats* response) {
  response->set_tier(tier);
  response->set_capacity_bytes(stats.capacity_bytes);
  response->set_resident_bytes(stats.resident_bytes);
  response->set_resident_logical_bytes(stats.resident_logical_bytes);
  response->set_pages(stats.pages);
  response->set_evicted_pages(stats.evicted.capacity + stats.evicted.ancestor +
                              stats.evicted.deleted + stats.evicted.corrupt);
  response->set_state(stats.state);
}

void FillKeyspaces(const CallContext& context, v1::StatsResponse* response) {
  for (const auto& keyspace : context.keyspaces.List()) {
    if (!MaySee(context, *keyspace)) continue;
    auto* entry = response->add_keyspaces();
    entry->set_keyspace(std::string(keyspace->id.view()));
    entry->set_model(keyspace->model);
    entry->set_generation(keyspace->generation.load());
    entry->set_state(ToProto(keyspace->state.load()));
    entry->set_state_reason(context.keyspaces.ReasonOf(keyspace->id).reason);
  }
}

}  // namespace

void FillStats(const CallContext& context, const NodeInfo& node, v1::StatsResponse* response) {
  const storage::StoreStats stats = context.store.Stats();
  const SessionTable::Totals totals = context.sessions.totals();
  response->set_version(node.version);
  response->set_node_id(node.id);
  response->set_uptime_seconds(SecondsBetween(node.started, context.clock.Now()));
  FillTier(v1::TIER_HOST, stats.host, response->add_tiers());
  FillTier(v1::TIER_SSD, stats.ssd, response->add_tiers());
  FillTier(v1::TIER_DEVICE, stats.device, response->add_tiers());
  FillKeyspaces(context, response);
  response->set_sessions(static_cast<uint32_t>(totals.sessions));
  response->set_leases(static_cast<uint32_t>(stats.leases));
  response->set_reservations(static_cast<uint32_t>(totals.reservations));
  for (int tier = 0; tier < kTokenTierCount; ++tier) {
    const auto label = static_cast<TokenTier>(tier);
    (*response->mutable_lookup_tokens())[TokenTierName(label)] =
        context.metrics.tokens.Total(label);
  }
  for (const NamedCounter& counter : UnlabelledCounters(context.metrics, stats)) {
    (*response->mutable_counters())[counter.name] = counter.value;
  }
}

void FillNodes(const CallContext& context, const NodeInfo& node, v1::ListNodesResponse* response) {
  if (context.cluster != nullptr) return context.cluster->ListNodes(response);
  auto* self = response->add_nodes();
  self->set_id(node.id);
  self->set_address(node.address);
  self->set_version(node.version);
  self->set_self(true);
  self->set_up(true);
  self->set_state("active");
}

}  // namespace crumb::server
