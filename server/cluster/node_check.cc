// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/node_check.h"

#include <cmath>
#include <map>

#include "fmt/format.h"

namespace crumb::server {

absl::Status CheckNode(const v1::NodeRecord& self, const v1::NodeRecord& other) {
  const std::string who = fmt::format("node {} at {}", other.id(), other.grpc_address());
  if (other.cluster() != self.cluster()) {
    return absl::FailedPreconditionError(fmt::format("{} belongs to cluster '{}', this one to '{}'",
                                                     who, other.cluster(), self.cluster()));
  }
  if (other.id() == self.id() && other.incarnation() != self.incarnation()) {
    return absl::FailedPreconditionError(
        fmt::format("{} has this node's id: one's data folder was copied from the other; give it a "
                    "new one",
                    who));
  }
  if (other.wire_max() < self.wire_min() || other.wire_min() > self.wire_max()) {
    return absl::FailedPreconditionError(fmt::format(
        "{} (version {}) supports wire versions {} to {}, this node {} to {}: upgrade in "
        "steps that have one in common",
        who, other.version(), other.wire_min(), other.wire_max(), self.wire_min(),
        self.wire_max()));
  }
  if (other.layout_id() != self.layout_id()) {
    return absl::FailedPreconditionError(
        fmt::format("{} (version {}) keeps page tiles of layout {}, this node of layout {}", who,
                    other.version(), other.layout_id(), self.layout_id()));
  }
  if (other.id().empty() || other.grpc_address().empty() || !(other.weight() > 0) ||
      !std::isfinite(other.weight())) {
    return absl::FailedPreconditionError(who + " has a record without id, address or weight");
  }
  return absl::OkStatus();
}

std::vector<v1::NodeRecord> UsableNodes(const v1::NodeRecord& self,
                                        const std::vector<v1::NodeRecord>& nodes,
                                        std::vector<std::string>* refused) {
  std::vector<v1::NodeRecord> usable;
  std::map<std::string, std::string> address_of;  // keyed by node id
  for (const v1::NodeRecord& node : nodes) {
    if (node.id() == self.id() && node.incarnation() == self.incarnation()) continue;
    const absl::Status fits = CheckNode(self, node);
    if (!fits.ok()) {
      refused->push_back(std::string(fits.message()));
      continue;
    }
    const auto [known, is_new] = address_of.try_emplace(node.id(), node.grpc_address());
    if (!is_new) {
      refused->push_back(
          fmt::format("nodes at {} and {} have one id, {}: the second is left out; "
                      "give it a data folder of its own",
                      known->second, node.grpc_address(), node.id()));
      continue;
    }
    usable.push_back(node);
  }
  return usable;
}

}  // namespace crumb::server
