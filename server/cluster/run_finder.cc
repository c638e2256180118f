// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/run_finder.h"

#include <vector>

namespace crumb::server {
namespace {

// Longer chains than any context has.
constexpr uint32_t kPagesMax = 1 << 17;

}  // namespace

std::optional<PageKey> RunFinder::Find(const FragmentHeader& header) {
  const std::optional<Place> place = PlaceOf(header);
  if (!place) return std::nullopt;
  Remember(header.key, *place);
  return place->run;
}

std::optional<RunFinder::Place> RunFinder::PlaceOf(const FragmentHeader& header) {
  if (header.parent == PageKey{}) return Place{header.key, 0};
  if (const auto known = Known(header.key)) return known;
  if (header.position > 0 && (header.position - 1) % kRunPages == 0) {
    return Place{header.key, header.position - 1};
  }
  if (const auto parent = Known(header.parent)) {
    const uint32_t position = parent->position + 1;
    return Place{position % kRunPages == 0 ? header.key : parent->run, position};
  }
  return header.position > 0 ? FromPosition(header) : FromRoot(header);
}

std::optional<RunFinder::Place> RunFinder::Known(const PageKey& key) const {
  MutexLock lock(&mutex_);
  const auto found = places_.find(key);
  if (found == places_.end()) return std::nullopt;
  return found->second;
}

std::optional<RunFinder::Place> RunFinder::FromPosition(const FragmentHeader& header) const {
  const uint32_t position = header.position - 1;
  PageKey run = header.parent;
  for (uint32_t steps = 1; steps < position % kRunPages; ++steps) {
    const std::optional<PageKey> parent = store_.ParentOf(header.keyspace, run);
    if (!parent || *parent == PageKey{}) return std::nullopt;
    run = *parent;
  }
  return Place{run, position};
}

std::optional<RunFinder::Place> RunFinder::FromRoot(const FragmentHeader& header) const {
  std::vector<PageKey> chain = {header.key, header.parent};  // from the page to the root
  while (chain.size() < kPagesMax) {
    const std::optional<PageKey> parent = store_.ParentOf(header.keyspace, chain.back());
    if (!parent) return std::nullopt;
    if (*parent == PageKey{}) {
      const auto position = static_cast<uint32_t>(chain.size() - 1);
      return Place{chain[position % kRunPages], position};
    }
    chain.push_back(*parent);
  }
  return std::nullopt;
}

void RunFinder::Remember(const PageKey& key, const Place& place) {
  MutexLock lock(&mutex_);
  if (!places_.emplace(key, place).second) return;
  by_age_.push_back(key);
  while (by_age_.size() > pages_max_) {
    places_.erase(by_age_.front());
    by_age_.pop_front();
  }
}

}  // namespace crumb::server
