// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/page_key.h"

// Choice of the nodes that are the homes of a run: docs/adr/0007-placement.md. The functions are
// pure; every node that has the same view gets the same result.
namespace crumb {

// Consecutive pages of a sequence that are placed together.
inline constexpr size_t kRunPages = 32;

// A node as placement sees it.
struct PlacementNode {
  std::string id;       // unique within a view
  double weight = 1;    // above 0: share of the runs
  std::string host;     // two nodes of one host never hold two replicas of a run
  std::string zone;     // replicas go to distinct zones while there are some; empty: unknown
  uint64_t digest = 0;  // NodeDigest(id)
};

uint64_t NodeDigest(const std::string& id);

// The rank of a node for a run: the highest ones are its homes. From -infinity to 0.
double PlacementScore(const PlacementNode& node, const PageKey& run);

// Indices of the homes of the run that begins with page `run`, best first: at most `replicas`, on
// distinct hosts, and on distinct zones as far as there are such. Fewer when hosts are fewer.
std::vector<size_t> HomesOf(std::span<const PlacementNode> nodes, const PageKey& run,
                            size_t replicas);

}  // namespace crumb
