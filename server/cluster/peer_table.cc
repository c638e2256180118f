// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_table.h"

#include <algorithm>
#include <utility>

namespace crumb::server {

void PeerTable::SetPeers(const Peers& peers) {
  std::map<std::string, std::shared_ptr<Peer>> table;
  for (const auto& peer : peers) table[peer->id()] = peer;
  // The old ones end outside the lock.
  MutexLock lock(&mutex_);
  peers_.swap(table);
}

std::shared_ptr<Peer> PeerTable::Find(const std::string& id) const {
  MutexLock lock(&mutex_);
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

PeerTable::Peers PeerTable::All() const {
  MutexLock lock(&mutex_);
  Peers all;
  for (const auto& [id, peer] : peers_) all.push_back(peer);
  return all;
}

std::vector<std::string> PeerTable::IdsOf(const View& view, const PageKey& run) const {
  std::vector<std::string> ids;
  for (const size_t home : HomesOf(view.nodes, run, replicas_)) {
    ids.push_back(view.nodes[home].id);
  }
  return ids;
}

PeerTable::Homes PeerTable::HomesOfRun(const PageKey& run) const {
  const ViewHistory::Views views = history_.views();
  return {IdsOf(*views.current, run), IdsOf(*views.previous, run)};
}

bool PeerTable::IsHome(const PageKey& run) const {
  const Homes homes = HomesOfRun(run);
  const auto is_self = [this](const std::string& id) { return id == self_; };
  return std::any_of(homes.current.begin(), homes.current.end(), is_self) ||
         std::any_of(homes.previous.begin(), homes.previous.end(), is_self);
}

std::vector<std::string> PeerTable::HomesToPush(const PageKey& run) const {
  std::vector<std::string> homes = IdsOf(*history_.views().current, run);
  std::erase(homes, self_);
  return homes;
}

PeerTable::Peers PeerTable::HomesToQuery(const PageKey& run) const {
  const Homes homes = HomesOfRun(run);
  std::vector<std::string> ids = homes.current;
  for (const std::string& id : homes.previous) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
  Peers peers;
  for (const std::string& id : ids) {
    auto peer = id == self_ ? nullptr : Find(id);
    if (peer != nullptr) peers.push_back(std::move(peer));
  }
  return peers;
}

}  // namespace crumb::server
