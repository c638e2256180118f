// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/reoffer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/placement.h"

namespace crumb::server {
namespace {

using std::chrono::steady_clock;

// Pages between two looks at the clock.
constexpr size_t kPacePages = 64;
// Longest time between two looks at whether crumbd stops, while homes take no offers.
constexpr auto kRoomWait = std::chrono::milliseconds(100);

// The ranges of a page that this node holds: all tiles, or the heads of which it has all layers, as
// tensor-parallel ranks on several hosts commit them.
std::vector<TileRange> HeldRanges(storage::TieredStore& store, const Keyspace& keyspace,
                                  const PageKey& key) {
  storage::AcquireRequest one;
  one.keyspace = keyspace.id;
  one.generation = keyspace.generation.load();
  one.keys = {key};
  one.range = keyspace.geometry.all_tiles();
  if (store.Lookup(one).hit_pages > 0) return {one.range};
  std::vector<TileRange> held;
  const TileRange all = one.range;
  for (uint16_t head = all.heads.begin; head < all.heads.end; ++head) {
    const auto next = static_cast<uint16_t>(head + 1);
    one.range.heads = {head, next};
    if (store.Lookup(one).hit_pages == 0) continue;
    if (!held.empty() && held.back().heads.end == head) {
      held.back().heads.end = next;
    } else {
      held.push_back(one.range);
    }
  }
  return held;
}

}  // namespace

void Reoffer::NodesChanged() {
  MutexLock lock(&mutex_);
  pending_ = true;
  changed_.NotifyAll();
}

void Reoffer::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

uint64_t Reoffer::walks() const {
  MutexLock lock(&mutex_);
  return walks_;
}

void Reoffer::Run() {
  while (WaitForChange()) {
    Nodes now = NodesNow();
    if (sent_.view == now.view && sent_.incarnations == now.incarnations) continue;
    if (!Walk(now)) return;
    sent_ = std::move(now);
    MutexLock lock(&mutex_);
    ++walks_;
  }
}

bool Reoffer::WaitForChange() {
  MutexLock lock(&mutex_);
  while (!stopping_ && !pending_) changed_.Wait(&mutex_);
  pending_ = false;
  return !stopping_;
}

bool Reoffer::Pace(steady_clock::time_point due) {
  MutexLock lock(&mutex_);
  while (!stopping_ && steady_clock::now() < due) changed_.WaitUntil(&mutex_, due);
  return !stopping_;
}

bool Reoffer::WaitForRoom() {
  while (Pace(steady_clock::time_point::min())) {
    if (parts_.pusher.WaitForRoomForCopies(steady_clock::now() + kRoomWait)) return true;
  }
  return false;
}

Reoffer::Nodes Reoffer::NodesNow() const {
  Nodes now;
  now.view = parts_.peers.history().views().current;
  for (const auto& peer : parts_.peers.All()) {
    now.incarnations[peer->id()] = peer->record().incarnation();
  }
  return now;
}

bool Reoffer::Walk(const Nodes& now) {
  const auto pause =
      std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(
          static_cast<double>(kPacePages) / static_cast<double>(parts_.pages_per_second)));
  auto due = steady_clock::now();
  size_t walked = 0;
  for (const auto& keyspace : parts_.keyspaces.List()) {
    std::vector<PageKey> keys;
    parts_.store.ForEachPage(keyspace->id, [&keys](const PageKey& key, Tier tier) {
      // No other node can read pages on a device.
      if (tier != Tier::kDevice) keys.push_back(key);
    });
    for (const PageKey& key : keys) {
      if (walked++ % kPacePages == 0) {
        if (!Pace(due)) return false;
        due = std::max(due, steady_clock::now() - pause) + pause;
      }
      if (!WaitForRoom()) return false;
      OfferPage(now, *keyspace, key);
    }
  }
  return true;
}

void Reoffer::OfferPage(const Nodes& now, const Keyspace& keyspace, const PageKey& key) {
  const auto parent = parts_.store.ParentOf(keyspace.id, key);
  if (!parent) return;  // it is gone by now
  FragmentHeader header;
  header.keyspace = keyspace.id;
  header.key = key;
  header.parent = *parent;
  const std::optional<PageKey> run = parts_.runs.Find(header);
  if (!run) return parts_.pusher.NoteDrop(PushDrop::kUnplaced);
  const std::vector<std::string> homes = NewHomesOf(now, *run);
  if (homes.empty()) return;
  const std::vector<TileRange> ranges = HeldRanges(parts_.store, keyspace, key);
  int tiles = 0;
  for (const TileRange& range : ranges) tiles += range.tiles();
  const bool bf16 = parts_.store.PageBytes(keyspace.id, key) >=
                    FragmentTilesBytes(tiles, keyspace.geometry.bf16_tile_bytes());
  header.tile_bytes =
      bf16 ? keyspace.geometry.bf16_tile_bytes() : keyspace.geometry.int2_tile_bytes();
  for (const TileRange& range : ranges) {
    header.range = range;
    for (const std::string& home : homes) {
      if (!WaitForRoom()) return;
      parts_.pusher.OfferAgain(home, header, *run);
    }
  }
}

std::vector<std::string> Reoffer::NewHomesOf(const Nodes& now, const PageKey& run) const {
  std::vector<std::string> homes;
  std::vector<std::string> sent;
  if (sent_.view != nullptr) {
    for (const size_t home : HomesOf(sent_.view->nodes, run, parts_.replicas)) {
      sent.push_back(sent_.view->nodes[home].id);
    }
  }
  for (const size_t home : HomesOf(now.view->nodes, run, parts_.replicas)) {
    const std::string& id = now.view->nodes[home].id;
    const auto process = now.incarnations.find(id);
    if (process == now.incarnations.end()) continue;  // this node, or one that has just left
    const auto before = sent_.incarnations.find(id);
    const bool same = before != sent_.incarnations.end() && before->second == process->second;
    if (same && std::find(sent.begin(), sent.end(), id) != sent.end()) continue;
    homes.push_back(id);
  }
  return homes;
}

}  // namespace crumb::server
