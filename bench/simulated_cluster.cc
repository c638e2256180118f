// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/simulated_cluster.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/replay_workload.h"
#include "common/sha256.h"

namespace crumb::bench {
namespace {

constexpr size_t kBlockPages = kTraceBlockTokens / kPageTokens;
constexpr size_t kRunBlocks = kRunPages / kBlockPages;
static_assert(kRunBlocks * kBlockPages == kRunPages);
// A block stands for the whole of its pages.
constexpr TileRange kAllTiles = {{0, 1}, {0, 1}};

}  // namespace

void NodeCache::Use(uint32_t block, size_t capacity) {
  const auto found = places_.find(block);
  if (found != places_.end()) {
    order_.splice(order_.begin(), order_, found->second);
    return;
  }
  order_.push_front(block);
  places_[block] = order_.begin();
  if (order_.size() <= capacity) return;
  places_.erase(order_.back());
  order_.pop_back();
}

std::vector<PlacementNode> SimulatedNodes(int count) {
  std::vector<PlacementNode> nodes(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    PlacementNode& node = nodes[static_cast<size_t>(i)];
    node.id = absl::StrCat("node-", i);
    node.host = node.id;
    node.digest = NodeDigest(node.id);
  }
  return nodes;
}

PageKey BlockKey(uint32_t block) {
  PageKey key;
  key.bytes = Sha256(absl::StrCat("block ", block));
  return key;
}

SimulatedCluster::SimulatedCluster(const Options& options)
    : options_(options),
      nodes_(SimulatedNodes(options.nodes)),
      caches_(nodes_.size()),
      network_(nodes_.size(), options.network) {
  totals_.served.assign(nodes_.size(), 0);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    numbers_[nodes_[i].id] = i;
    // The directory has more entries than a node of this memory would be the home of.
    directories_.push_back(std::make_unique<HolderDirectory>(4 * options.capacity_blocks));
  }
}

const PageKey& SimulatedCluster::KeyOf(uint32_t block) {
  if (block >= keys_.size()) keys_.resize(2 * static_cast<size_t>(block) + 1);
  if (keys_[block] == PageKey()) keys_[block] = BlockKey(block);
  return keys_[block];
}

const std::vector<size_t>& SimulatedCluster::HomesOfRun(uint32_t first_block) {
  const auto [entry, is_new] = homes_.try_emplace(first_block);
  if (is_new) {
    entry->second = HomesOf(nodes_, KeyOf(first_block), static_cast<size_t>(options_.replicas));
  }
  return entry->second;
}

size_t SimulatedCluster::LeadingAt(size_t node, std::span<const uint32_t> blocks) const {
  size_t leading = 0;
  while (leading < blocks.size() && caches_[node].Has(blocks[leading])) ++leading;
  return leading;
}

void SimulatedCluster::Access(size_t node, std::span<const uint32_t> request, double now) {
  size_t hits = LeadingAt(node, request);
  totals_.local_hits += hits;
  double ended = now;
  hits = Pull(node, request, hits, now, &ended);
  for (size_t i = request.size(); i-- > 0;) caches_[node].Use(request[i], options_.capacity_blocks);
  Push(node, request, hits, ended);
}

void SimulatedCluster::CountFanout(size_t node, std::span<const uint32_t> request, size_t hits) {
  std::set<size_t> asked;
  for (size_t run = hits / kRunBlocks; run * kRunBlocks < request.size(); ++run) {
    for (const size_t home : HomesOfRun(request[run * kRunBlocks])) {
      if (home != node) asked.insert(home);
    }
  }
  totals_.asked += asked.size();
  if (!asked.empty()) ++totals_.asking;
  const size_t pages = (request.size() - hits) * kBlockPages + hits % kRunBlocks * kBlockPages;
  const size_t bound = (pages + kRunPages - 1) / kRunPages;
  if (asked.size() > bound * HomesOfRun(request[0]).size()) ++totals_.fanout_over;
  totals_.fanout_max = std::max(totals_.fanout_max, asked.size());
  totals_.fanout_bound = std::max(totals_.fanout_bound, bound);
}

size_t SimulatedCluster::Pull(size_t node, std::span<const uint32_t> request, size_t hits,
                              double now, double* ended) {
  if (hits == request.size()) return hits;
  CountFanout(node, request, hits);
  bool any = false, referred = false;
  std::map<size_t, size_t> from;  // blocks, by the node that serves them
  while (hits < request.size()) {
    if (caches_[node].Has(request[hits])) {  // the node is its home
      ++totals_.local_hits;
      ++hits;
      continue;
    }
    const size_t begin = hits / kRunBlocks * kRunBlocks;
    const auto wanted = request.subspan(hits, std::min(begin + kRunBlocks, request.size()) - hits);
    const Source source = FindSource(node, request[begin], wanted, now);
    if (source.blocks == 0) break;
    const auto brought = wanted.first(source.blocks);
    for (const uint32_t block : brought) {
      caches_[source.node].Use(block, options_.capacity_blocks);
    }
    totals_.served[source.node] += source.blocks;
    totals_.remote_hits += source.blocks;
    totals_.referred += source.referred ? source.blocks : 0;
    from[source.node] += source.blocks;
    any = true;
    referred |= source.referred;
    *ended = std::max(*ended, network_.Send(source.node, node, source.ready,
                                            source.blocks * options_.block_bytes));
    Note(node, request[begin], brought);
    hits += source.blocks;
  }
  for (const auto& [source, blocks] : from) {
    totals_.longest_pull = std::max(totals_.longest_pull, blocks);
  }
  if (any) (referred ? totals_.by_referral : totals_.one_hop).push_back(*ended - now);
  return hits;
}

// Asks every home and takes the longest prefix.
SimulatedCluster::Source SimulatedCluster::FindSource(size_t node, uint32_t run,
                                                      std::span<const uint32_t> wanted,
                                                      double now) {
  Source best;
  for (const size_t home : HomesOfRun(run)) {
    const Source source = AskHome(node, home, wanted, now);
    if (source.blocks > best.blocks) best = source;
    if (best.blocks == wanted.size()) break;
  }
  return best;
}

SimulatedCluster::Source SimulatedCluster::AskHome(size_t node, size_t home,
                                                   std::span<const uint32_t> wanted, double now) {
  HolderDirectory& directory = *directories_[home];
  std::vector<PageKey> keys;
  for (const uint32_t block : wanted) keys.push_back(KeyOf(block));
  HolderDirectory::Query question;
  question.requester = nodes_[node].id;
  question.generation = 1;
  question.range = kAllTiles;
  question.keys = keys;
  question.own_pages = home == node ? 0 : LeadingAt(home, wanted);
  // One round trip to ask, half a one to request the bytes; the other half is on their way.
  double asked = home == node ? now : now + network_.RoundTrip(node, home);
  const Source own = {home, question.own_pages, asked + network_.RoundTrip(node, home) / 2, false};
  const auto referral = directory.Refer(question);
  if (!referral) return own;
  Source best;
  for (const std::string& id : referral->nodes) {
    const size_t holder = numbers_.find(id)->second;
    const size_t has = std::min(LeadingAt(holder, wanted), wanted.size());
    asked += network_.RoundTrip(node, holder);
    if (has > best.blocks) {
      best = {holder, has, asked + network_.RoundTrip(node, holder) / 2, true};
    }
    if (has >= referral->pages) return best;
    directory.Forget(id, question.keyspace, std::span(keys).subspan(has));
  }
  return own.blocks > best.blocks
             ? Source{home, own.blocks, asked + 1.5 * network_.RoundTrip(node, home), false}
             : best;
}

// Notifies homes of the blocks that a node has from now on.
void SimulatedCluster::Note(size_t holder, uint32_t run, std::span<const uint32_t> blocks) {
  HolderDirectory::Offer offer;
  offer.node = nodes_[holder].id;
  offer.generation = 1;
  offer.range = kAllTiles;
  for (const uint32_t block : blocks) offer.keys.push_back(KeyOf(block));
  offer.tile_bytes.assign(blocks.size(), 0);
  for (const size_t home : HomesOfRun(run)) {
    if (home != holder) directories_[home]->Note(offer);
  }
}

void SimulatedCluster::Push(size_t node, std::span<const uint32_t> request, size_t hits,
                            double now) {
  const bool copies = options_.push == SimulatedPush::kAlways || options_.replicas > 1;
  for (size_t begin = hits; begin < request.size();) {
    const size_t run = begin / kRunBlocks * kRunBlocks;
    const size_t end = std::min(run + kRunBlocks, request.size());
    const auto blocks = request.subspan(begin, end - begin);
    Note(node, request[run], blocks);
    for (const size_t home : HomesOfRun(request[run])) {
      if (home == node || !copies) continue;
      size_t sent = 0;
      for (const uint32_t block : blocks) {
        if (!caches_[home].Has(block)) ++sent;
        caches_[home].Use(block, options_.capacity_blocks);
      }
      totals_.pushed += sent;
      if (sent > 0) network_.Send(node, home, now, sent * options_.block_bytes);
    }
    begin = end;
  }
}

// Placement is a pure function, so the effect of a change can be counted without making it.
double SimulatedCluster::Remapped(const std::vector<PlacementNode>& nodes) const {
  size_t moved = 0;
  for (const auto& [block, homes] : homes_) {
    const std::string& home = nodes_[homes[0]].id;
    moved += nodes.empty() || nodes[HomesOf(nodes, keys_[block], 1).at(0)].id != home;
  }
  return static_cast<double>(moved) / static_cast<double>(std::max<size_t>(homes_.size(), 1));
}

double SimulatedCluster::RemappedOnJoin() const {
  return Remapped(SimulatedNodes(options_.nodes + 1));
}

double SimulatedCluster::RemappedOnLeave() const {
  return Remapped({nodes_.begin(), nodes_.end() - 1});
}

}  // namespace crumb::bench
