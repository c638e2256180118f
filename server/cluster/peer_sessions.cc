// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_sessions.h"

#include <cstring>

#include "common/status_macros.h"
#include "server/session/random_id.h"

namespace crumb::server {

absl::StatusOr<transport::SessionToken> PeerSessions::Grant(const std::string& node,
                                                            const KeyspaceId& keyspace) {
  MutexLock lock(&mutex_);
  auto token = tokens_.find(node);
  if (token == tokens_.end()) {
    if (tokens_.size() >= nodes_max_) {
      return absl::ResourceExhaustedError("cluster.nodes_max is reached");
    }
    CRUMB_ASSIGN_OR_RETURN(const RandomId id, RandomId::Make());
    transport::SessionToken fresh;
    static_assert(sizeof(fresh) == sizeof(id.bytes));
    std::memcpy(fresh.data(), id.bytes.data(), fresh.size());
    token = tokens_.emplace(node, fresh).first;
    sessions_[fresh].node = node;
  }
  sessions_[token->second].keyspaces.insert(keyspace);
  return token->second;
}

bool PeerSessions::MayRead(const transport::SessionToken& token, const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  const auto session = sessions_.find(token);
  return session != sessions_.end() && session->second.keyspaces.contains(keyspace);
}

void PeerSessions::Forget(const std::string& node) {
  MutexLock lock(&mutex_);
  const auto token = tokens_.find(node);
  if (token == tokens_.end()) return;
  sessions_.erase(token->second);
  tokens_.erase(token);
}

}  // namespace crumb::server
