// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_sessions.h"

#include <algorithm>
#include <cstring>

#include "common/status_macros.h"
#include "server/base/random_id.h"

namespace crumb::server {

absl::StatusOr<transport::SessionToken> PeerSessions::Grant(const std::string& node,
                                                            const KeyspaceId& keyspace, Who who) {
  MutexLock lock(&mutex_);
  auto token = tokens_.find(node);
  const auto stranger = std::find(strangers_.begin(), strangers_.end(), node);
  const bool becomes_member =
      who == Who::kMember && (token == tokens_.end() || stranger != strangers_.end());
  if (becomes_member && tokens_.size() - strangers_.size() >= nodes_max_) {
    return absl::ResourceExhaustedError("cluster.nodes_max is reached");
  }
  if (becomes_member && stranger != strangers_.end()) strangers_.erase(stranger);
  if (token == tokens_.end()) {
    CRUMB_ASSIGN_OR_RETURN(const RandomId id, RandomId::Make());
    transport::SessionToken fresh;
    static_assert(sizeof(fresh) == sizeof(id.bytes));
    std::memcpy(fresh.data(), id.bytes.data(), fresh.size());
    token = tokens_.emplace(node, fresh).first;
    sessions_[fresh].node = node;
    if (who == Who::kStranger) strangers_.push_back(node);
    if (strangers_.size() > kStrangersMax) ForgetLocked(std::string(strangers_.front()));
  }
  sessions_[token->second].keyspaces.insert(keyspace);
  return token->second;
}

std::optional<std::string> PeerSessions::ReaderOf(const transport::SessionToken& token,
                                                  const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  const auto session = sessions_.find(token);
  if (session == sessions_.end() || !session->second.keyspaces.contains(keyspace)) {
    return std::nullopt;
  }
  return session->second.node;
}

void PeerSessions::Forget(const std::string& node) {
  MutexLock lock(&mutex_);
  ForgetLocked(node);
}

void PeerSessions::ForgetLocked(const std::string& node) {
  std::erase(strangers_, node);
  const auto token = tokens_.find(node);
  if (token == tokens_.end()) return;
  sessions_.erase(token->second);
  tokens_.erase(token);
}

}  // namespace crumb::server
