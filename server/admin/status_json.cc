// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/status_json.h"

#include <map>
#include <span>

#include "common/hex.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20) {
      quoted += fmt::format("\\u{:04x}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string Hex(const std::string& bytes) {
  return HexEncode({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

std::string Join(const std::vector<std::string>& parts) {
  std::string joined;
  for (const std::string& part : parts) joined += (joined.empty() ? "" : ",") + part;
  return joined;
}

template <typename Map>
std::string Numbers(const Map& numbers) {
  std::vector<std::string> parts;
  for (const auto& [name, value] :
       std::map<std::string, uint64_t>(numbers.begin(), numbers.end())) {
    parts.push_back(fmt::format("{}:{}", Quoted(name), value));
  }
  return "{" + Join(parts) + "}";
}

std::string TierJson(const v1::StatsResponse::TierStats& tier) {
  return fmt::format(
      "{{\"tier\":{},\"capacity_bytes\":{},\"resident_bytes\":{},\"resident_logical_bytes\":{},"
      "\"pages\":{},\"evicted_pages\":{},\"state\":{}}}",
      Quoted(tier.tier() == v1::TIER_HOST ? "host" : "ssd"), tier.capacity_bytes(),
      tier.resident_bytes(), tier.resident_logical_bytes(), tier.pages(), tier.evicted_pages(),
      Quoted(tier.state()));
}

std::string KeyspaceJson(const v1::StatsResponse::KeyspaceStats& keyspace) {
  return fmt::format(
      "{{\"keyspace\":{},\"model\":{},\"generation\":{},\"state\":{},\"state_reason\":{}}}",
      Quoted(Hex(keyspace.keyspace())), Quoted(keyspace.model()), keyspace.generation(),
      Quoted(keyspace.state() == v1::KEYSPACE_STATE_BF16 ? "bf16" : "active"),
      Quoted(keyspace.state_reason()));
}

}  // namespace

std::string JsonObject(const std::vector<std::pair<std::string, std::string>>& members) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : members) parts.push_back(Quoted(name) + ":" + Quoted(value));
  return "{" + Join(parts) + "}";
}

std::string StatusJson(const v1::StatsResponse& stats, const std::string& endpoints_json) {
  std::vector<std::string> tiers;
  for (const auto& tier : stats.tiers()) tiers.push_back(TierJson(tier));
  std::vector<std::string> keyspaces;
  for (const auto& keyspace : stats.keyspaces()) keyspaces.push_back(KeyspaceJson(keyspace));
  return fmt::format(
      "{{\"node_id\":{},\"version\":{},\"uptime_seconds\":{:.3f},\"endpoints\":{},"
      "\"sessions\":{},\"leases\":{},\"reservations\":{},\"tiers\":[{}],\"keyspaces\":[{}],"
      "\"lookup_tokens\":{},\"counters\":{}}}\n",
      Quoted(stats.node_id()), Quoted(stats.version()), stats.uptime_seconds(), endpoints_json,
      stats.sessions(), stats.leases(), stats.reservations(), Join(tiers), Join(keyspaces),
      Numbers(stats.lookup_tokens()), Numbers(stats.counters()));
}

}  // namespace crumb::server
