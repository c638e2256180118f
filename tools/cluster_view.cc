// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/cluster_view.h"

#include "common/printable.h"
#include "fmt/format.h"
#include "tools/text_table.h"

namespace crumb::tools {
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

std::string PlaceText(const client::PagePlace& place) {
  std::string text = "keyspace        " + place.keyspace.ToHex() + "\n";
  text +=
      "run             " + (place.run == PageKey() ? "not known here" : place.run.ToHex()) + "\n";
  text += "homes           " + Joined(place.homes) + "\n";
  text += "previous homes  " + Joined(place.previous_homes) + "\n";
  text += "held by         " + Joined(place.holders) + "\n";
  if (!place.silent.empty()) text += "no answer from  " + Joined(place.silent) + "\n";
  return text;
}

json PlaceJson(const client::PagePlace& place) {
  return {{"keyspace", place.keyspace.ToHex()},
          {"run", place.run.ToHex()},
          {"homes", place.homes},
          {"previous_homes", place.previous_homes},
          {"holders", place.holders},
          {"silent", place.silent}};
}

}  // namespace crumb::tools
