// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/crumbd_views.h"

#include "common/printable.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "tools/text_table.h"

namespace crumb::tools {
namespace {

using nlohmann::json;

std::string TiersText(const client::CacheStats& stats) {
  TextTable table({"tier", "state", "capacity", "used", "%", "pages", "saved", "evicted"});
  for (const auto& tier : stats.tiers) {
    const double factor = tier.resident_bytes == 0
                              ? 0
                              : static_cast<double>(tier.resident_logical_bytes) /
                                    static_cast<double>(tier.resident_bytes);
    table.AddRow({std::string(client::TierName(tier.tier)), tier.state,
                  FormatBytes(tier.capacity_bytes), FormatBytes(tier.resident_bytes),
                  FormatPercent(static_cast<double>(tier.resident_bytes),
                                static_cast<double>(tier.capacity_bytes)),
                  fmt::format("{}", tier.pages), factor == 0 ? "-" : fmt::format("{:.2f}x", factor),
                  fmt::format("{}", tier.evicted_pages)});
  }
  return table.ToString();
}

std::string KeyspacesText(const client::CacheStats& stats) {
  TextTable table({"keyspace", "model", "generation", "state", "reason"});
  for (const auto& keyspace : stats.keyspaces) {
    table.AddRow({keyspace.id.ToHex(), keyspace.model, fmt::format("{}", keyspace.generation),
                  StateName(keyspace.state), keyspace.state_reason});
  }
  return table.empty() ? "no keyspaces\n" : table.ToString();
}

json TierJson(const client::CacheStats::TierStats& tier) {
  return {{"tier", std::string(client::TierName(tier.tier))},
          {"state", tier.state},
          {"capacity_bytes", tier.capacity_bytes},
          {"resident_bytes", tier.resident_bytes},
          {"resident_logical_bytes", tier.resident_logical_bytes},
          {"pages", tier.pages},
          {"evicted_pages", tier.evicted_pages}};
}

json CommonJson(const client::CacheStats& stats) {
  json tiers = json::array();
  for (const auto& tier : stats.tiers) tiers.push_back(TierJson(tier));
  return {{"version", stats.version},
          {"node_id", stats.node_id},
          {"uptime_seconds", stats.uptime_seconds},
          {"tiers", std::move(tiers)},
          {"sessions", stats.sessions},
          {"leases", stats.leases},
          {"reservations", stats.reservations}};
}

}  // namespace

HitRates HitRatesOf(const client::CacheStats& stats) {
  HitRates rates;
  for (const auto& [label, tokens] : stats.lookup_tokens) {
    if (label == "window") continue;
    rates.requested_tokens += tokens;
    if (label != "miss") rates.hit_tokens += tokens;
  }
  return rates;
}

double BytesSavedFactor(const client::CacheStats& stats) {
  double logical = 0, resident = 0;
  for (const auto& tier : stats.tiers) {
    logical += static_cast<double>(tier.resident_logical_bytes);
    resident += static_cast<double>(tier.resident_bytes);
  }
  return resident == 0 ? 0 : logical / resident;
}

std::string HealthOf(const client::CacheStats& stats) {
  std::string degraded;
  for (const auto& tier : stats.tiers) {
    // A tier that is not configured does not degrade the service.
    if (tier.state == "active" || tier.state == "off: not configured") continue;
    degraded += fmt::format("{}{} {}", degraded.empty() ? "" : ", ", client::TierName(tier.tier),
                            tier.state);
  }
  return degraded.empty() ? "serving" : "degraded: " + degraded;
}

std::string StateName(client::KeyspaceState state) {
  if (state == client::KeyspaceState::kActive) return "active";
  return state == client::KeyspaceState::kBf16 ? "bf16" : "unknown";
}

std::string StatusText(const client::CacheStats& stats) {
  TextTable table({"crumbd", ""});
  table.AddRow({"health", HealthOf(stats)});
  table.AddRow({"version", stats.version});
  table.AddRow({"node", stats.node_id});
  table.AddRow({"up for", FormatUptime(stats.uptime_seconds)});
  table.AddRow({"sessions", fmt::format("{}", stats.sessions)});
  table.AddRow({"leases", fmt::format("{}", stats.leases)});
  table.AddRow({"reservations", fmt::format("{}", stats.reservations)});
  return table.ToString() + "\n" + TiersText(stats) + "\n" + KeyspacesText(stats);
}

json StatusJson(const client::CacheStats& stats) {
  json out = CommonJson(stats);
  out["health"] = HealthOf(stats);
  out["keyspaces"] = json::array();
  for (const auto& keyspace : stats.keyspaces) {
    out["keyspaces"].push_back({{"keyspace", keyspace.id.ToHex()},
                                {"model", keyspace.model},
                                {"generation", keyspace.generation},
                                {"state", StateName(keyspace.state)},
                                {"reason", keyspace.state_reason}});
  }
  return out;
}

std::string StatsText(const client::CacheStats& stats) {
  const HitRates rates = HitRatesOf(stats);
  TextTable tokens({"looked-up tokens", "tokens", "share"});
  for (const auto& [label, count] : stats.lookup_tokens) {
    tokens.AddRow({label, fmt::format("{}", count),
                   label == "window" ? "-"
                                     : FormatPercent(static_cast<double>(count),
                                                     static_cast<double>(rates.requested_tokens))});
  }
  tokens.AddRow({"hits together", fmt::format("{}", rates.hit_tokens),
                 FormatPercent(static_cast<double>(rates.hit_tokens),
                               static_cast<double>(rates.requested_tokens))});
  TextTable counters({"counter", "value"});
  for (const auto& [name, value] : stats.counters) {
    counters.AddRow({name, fmt::format("{}", value)});
  }
  const double factor = BytesSavedFactor(stats);
  return TiersText(stats) + "\n" + tokens.ToString() + "\nbytes saved: " +
         (factor == 0 ? std::string("nothing is stored")
                      : fmt::format("{:.2f}x less than in BF16", factor)) +
         "\n\n" + counters.ToString();
}

json StatsJson(const client::CacheStats& stats) {
  const HitRates rates = HitRatesOf(stats);
  json out = CommonJson(stats);
  out["lookup_tokens"] = stats.lookup_tokens;
  out["requested_tokens"] = rates.requested_tokens;
  out["hit_tokens"] = rates.hit_tokens;
  out["hit_rate"] = rates.requested_tokens == 0 ? 0
                                                : static_cast<double>(rates.hit_tokens) /
                                                      static_cast<double>(rates.requested_tokens);
  out["bytes_saved_factor"] = BytesSavedFactor(stats);
  out["counters"] = stats.counters;
  return out;
}

namespace {

using nlohmann::json;

std::string Joined(const std::vector<std::string>& ids) {
  std::string joined;
  for (const std::string& id : ids) joined += (joined.empty() ? "" : ", ") + Printable(id);
  return joined.empty() ? "none" : joined;
}

}  // namespace

std::string NodesText(const client::NodeList& list) {
  TextTable table({"node", "address", "state", "up", "weight", "host", "zone", "capacity",
                   "pages by", "version"});
  for (const auto& node : list.nodes) {
    std::string state = node.state;
    if (node.pages_to_push > 0) state += fmt::format(", {} pages left", node.pages_to_push);
    table.AddRow({node.id + (node.self ? " *" : ""), node.address, state, node.up ? "yes" : "no",
                  fmt::format("{}", node.weight), node.host, node.zone,
                  fmt::format("{:.1f} GB", static_cast<double>(node.capacity_bytes) / 1e9),
                  node.self ? "" : node.transport, node.version});
  }
  std::string text = table.ToString();
  text += list.view_epoch == 0
              ? "\nno cluster\n"
              : fmt::format("\nview {}, before it {}\n", list.view_epoch, list.previous_epoch);
  if (!list.trouble.empty()) text += "trouble: " + Printable(list.trouble) + "\n";
  for (const std::string& refused : list.refused) text += "refused: " + Printable(refused) + "\n";
  return text;
}

json NodesJson(const client::NodeList& list) {
  json nodes = json::array();
  for (const auto& node : list.nodes) {
    nodes.push_back({{"id", node.id},
                     {"address", node.address},
                     {"version", node.version},
                     {"self", node.self},
                     {"state", node.state},
                     {"up", node.up},
                     {"weight", node.weight},
                     {"host", node.host},
                     {"zone", node.zone},
                     {"capacity_bytes", node.capacity_bytes},
                     {"transport", node.transport},
                     {"breaker", node.breaker},
                     {"pages_to_push", node.pages_to_push}});
  }
  return {{"nodes", std::move(nodes)},
          {"view_epoch", list.view_epoch},
          {"previous_epoch", list.previous_epoch},
          {"refused", list.refused},
          {"trouble", list.trouble}};
}

std::string PlaceText(const client::PageLocation& place) {
  std::string text = "keyspace        " + place.keyspace.ToHex() + "\n";
  text +=
      "run             " + (place.run == PageKey() ? "not known here" : place.run.ToHex()) + "\n";
  text += "homes           " + Joined(place.homes) + "\n";
  text += "previous homes  " + Joined(place.previous_homes) + "\n";
  text += "held by         " + Joined(place.holders) + "\n";
  if (!place.silent.empty()) text += "no reply from   " + Joined(place.silent) + "\n";
  return text;
}

json PlaceJson(const client::PageLocation& place) {
  return {{"keyspace", place.keyspace.ToHex()},
          {"run", place.run.ToHex()},
          {"homes", place.homes},
          {"previous_homes", place.previous_homes},
          {"holders", place.holders},
          {"silent", place.silent}};
}

}  // namespace crumb::tools
