// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "client/c_api/core_table.h"
#include "client/c_api/handles.h"
#include "common/status_macros.h"
#include "crumb/cache_stats.h"
#include "fmt/format.h"

namespace crumb::c_api {
namespace {

void PassTier(const client::CacheStats::TierStats& tier, crumb_stat_receiver receiver,
              void* context) {
  const auto pass = [&](const char* name, uint64_t value) {
    receiver(context, fmt::format("tier.{}.{}", TierName(tier.tier), name).c_str(),
             std::to_string(value).c_str());
  };
  pass("capacity_bytes", tier.capacity_bytes);
  pass("resident_bytes", tier.resident_bytes);
  pass("resident_logical_bytes", tier.resident_logical_bytes);
  pass("pages", tier.pages);
  pass("evicted_pages", tier.evicted_pages);
  const std::string name = fmt::format("tier.{}.state", TierName(tier.tier));
  receiver(context, name.c_str(), tier.state.c_str());
}

void Pass(const client::CacheStats& stats, crumb_stat_receiver receiver, void* context) {
  const auto pass = [&](const std::string& name, uint64_t value) {
    receiver(context, name.c_str(), std::to_string(value).c_str());
  };
  receiver(context, "version", stats.version.c_str());
  receiver(context, "node_id", stats.node_id.c_str());
  receiver(context, "uptime_seconds", fmt::format("{:.3f}", stats.uptime_seconds).c_str());
  pass("sessions", stats.sessions);
  pass("leases", stats.leases);
  pass("reservations", stats.reservations);
  pass("keyspaces", stats.keyspaces.size());
  for (const client::CacheStats::TierStats& tier : stats.tiers) PassTier(tier, receiver, context);
  for (const auto& [tier, tokens] : stats.lookup_tokens) pass("lookup_tokens." + tier, tokens);
  for (const auto& [name, value] : stats.counters) pass(name, value);
}

}  // namespace

crumb_code ClientReadStats(crumb_client* client, crumb_stat_receiver receiver, void* context) {
  return Guarded([&]() -> absl::Status {
    if (receiver == nullptr) {
      return absl::InvalidArgumentError("crumb_client_read_stats: receiver is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::CacheStats stats, client->client->Stats());
    Pass(stats, receiver, context);
    return absl::OkStatus();
  });
}

}  // namespace crumb::c_api
