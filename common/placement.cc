// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/placement.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/sha256.h"

namespace crumb {
namespace {

// The finalizer of SplitMix64: every input bit moves every output bit.
uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t WordOf(std::span<const uint8_t> bytes, size_t offset) {
  uint64_t word = 0;
  for (size_t i = 0; i < sizeof(word); ++i) word |= uint64_t{bytes[offset + i]} << (8 * i);
  return word;
}

struct Ranked {
  double score;
  size_t node;
};

// The best node that `may_serve`, or none.
template <typename MayServe>
const Ranked* FirstOf(const std::vector<Ranked>& ranked, const MayServe& may_serve) {
  for (const Ranked& each : ranked) {
    if (may_serve(each.node)) return &each;
  }
  return nullptr;
}

}  // namespace

uint64_t NodeDigest(const std::string& id) {
  const Digest digest = Sha256(std::string_view(id));
  return WordOf(digest, 0);
}

double PlacementScore(const PlacementNode& node, const PageKey& run) {
  const uint64_t mixed = Mix(Mix(WordOf(run.bytes, 0) ^ node.digest) + WordOf(run.bytes, 8));
  // In (0, 1): 53 bits, never an end.
  const double uniform = (static_cast<double>(mixed >> 11) + 0.5) * 0x1p-53;
  return std::log(uniform) / node.weight;
}

std::vector<size_t> HomesOf(std::span<const PlacementNode> nodes, const PageKey& run,
                            size_t replicas) {
  std::vector<Ranked> ranked;
  ranked.reserve(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) ranked.push_back({PlacementScore(nodes[i], run), i});
  const auto better = [&](const Ranked& a, const Ranked& b) {
    return a.score != b.score ? a.score > b.score : nodes[a.node].id < nodes[b.node].id;
  };
  std::vector<size_t> homes;
  if (replicas <= 1) {
    const auto best = std::min_element(ranked.begin(), ranked.end(), better);
    if (best != ranked.end() && replicas == 1) homes.push_back(best->node);
    return homes;
  }
  std::sort(ranked.begin(), ranked.end(), better);
  const auto other_host = [&](size_t node) {
    return std::none_of(homes.begin(), homes.end(),
                        [&](size_t home) { return nodes[home].host == nodes[node].host; });
  };
  const auto other_zone = [&](size_t node) {
    return other_host(node) && std::none_of(homes.begin(), homes.end(), [&](size_t home) {
             return nodes[home].zone == nodes[node].zone;
           });
  };
  while (homes.size() < replicas) {
    const Ranked* next = FirstOf(ranked, other_zone);
    if (next == nullptr) next = FirstOf(ranked, other_host);
    if (next == nullptr) break;
    homes.push_back(next->node);
  }
  return homes;
}

}  // namespace crumb
