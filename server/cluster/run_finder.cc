// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/run_finder.h"

#include <algorithm>

namespace crumb::server {

std::optional<PageKey> RunFinder::Find(const FragmentHeader& header) {
  {
    MutexLock lock(&mutex_);
    credit_ = std::min<uint32_t>(credit_ + kRunPages, kWalkStepsMax);
  }
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

bool RunFinder::TakeStep() {
  MutexLock lock(&mutex_);
  if (credit_ == 0) return false;
  --credit_;
  return true;
}

std::optional<RunFinder::Place> RunFinder::FromRoot(const FragmentHeader& header) {
  std::vector<PageKey> chain = {header.key};  // keys from the page towards the root
  PageKey next = header.parent;
  // Brent's search for a ring: `mark` is the page that the walk stood at when its length was last a
  // power of two, so a ring leads back to it within twice the length of stem and ring.
  PageKey mark = header.key;
  size_t next_mark = 2;
  while (true) {
    if (next == PageKey{}) return PlaceChain(chain, std::nullopt);
    if (const auto known = Known(next)) return PlaceChain(chain, known);
    if (next == mark || next == header.key || !TakeStep()) return std::nullopt;
    const std::optional<PageKey> parent = store_.ParentOf(header.keyspace, next);
    if (!parent) return std::nullopt;
    chain.push_back(next);
    if (chain.size() == next_mark) {
      mark = next;
      next_mark *= 2;
    }
    next = *parent;
  }
}

RunFinder::Place RunFinder::PlaceChain(const std::vector<PageKey>& chain,
                                       const std::optional<Place>& root) {
  Place place;
  bool first = !root;
  if (root) place = *root;
  for (auto page = chain.rbegin(); page != chain.rend(); ++page) {
    if (!first) ++place.position;
    if (first || place.position % kRunPages == 0) place.run = *page;
    first = false;
    Remember(*page, place);
  }
  return place;
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
