// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/page_key.h"
#include "transport/fetch.h"

namespace crumb::server {

// Sessions of other nodes that fetch: each has one, whose token it got on the control plane, and
// may read the keyspaces that it named there. Nodes that are not in the view, as one that has just
// joined, are strangers: only the kStrangersMax that came last have a session. Thread-safe.
class PeerSessions {
 public:
  static constexpr size_t kStrangersMax = 64;
  enum class Who : uint8_t { kMember, kStranger };

  explicit PeerSessions(size_t nodes_max) : nodes_max_(nodes_max) {}

  // The token of `node`, which may read `keyspace` from now on. kResourceExhausted: too many nodes.
  absl::StatusOr<transport::SessionToken> Grant(const std::string& node, const KeyspaceId& keyspace,
                                                Who who = Who::kMember);

  // The node whose session may read `keyspace`; none: there is no such session.
  std::optional<std::string> ReaderOf(const transport::SessionToken& token,
                                      const KeyspaceId& keyspace) const;

  // The node has left.
  void Forget(const std::string& node);

 private:
  struct Session {
    std::string node;
    std::set<KeyspaceId> keyspaces;
  };
  void ForgetLocked(const std::string& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t nodes_max_;
  mutable Mutex mutex_;
  std::map<transport::SessionToken, Session> sessions_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, transport::SessionToken> tokens_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> strangers_ ABSL_GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace crumb::server
