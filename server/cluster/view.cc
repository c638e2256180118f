// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/view.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace crumb::server {
namespace {

auto Fields(const PlacementNode& node) {
  return std::tie(node.id, node.weight, node.host, node.zone);
}

bool SamePlacement(const std::vector<PlacementNode>& a, const std::vector<PlacementNode>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return Fields(x) == Fields(y); });
}

}  // namespace

ViewHistory::ViewHistory()
    : views_{std::make_shared<const View>(), std::make_shared<const View>()} {}

bool ViewHistory::Install(uint64_t epoch, std::vector<PlacementNode> nodes) {
  std::sort(nodes.begin(), nodes.end(),
            [](const PlacementNode& a, const PlacementNode& b) { return a.id < b.id; });
  for (PlacementNode& node : nodes) node.digest = NodeDigest(node.id);
  MutexLock lock(&mutex_);
  if (SamePlacement(views_.current->nodes, nodes)) return false;
  if (views_.current->epoch > epoch) return false;
  views_.previous =
      std::exchange(views_.current, std::make_shared<const View>(View{epoch, std::move(nodes)}));
  return true;
}

ViewHistory::Views ViewHistory::views() const {
  MutexLock lock(&mutex_);
  return views_;
}

}  // namespace crumb::server
