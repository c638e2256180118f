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
// may read the keyspaces that it named there. A request for bytes carries only the token, so that a
// process that can reach the transport's port reads nothing without one. Nodes that are not in the
// view, as one that has just joined, are strangers: only the kStrangersMax that came last have a
// session. Thread-safe.
class PeerSessions {
 public:
  static constexpr size_t kStrangersMax = 64;
  // Whether the node is in the view.
  enum class Who : uint8_t { kMember, kStranger };

  explicit PeerSessions(size_t nodes_max) : nodes_max_(nodes_max) {}

  // Returns the token of `node`, a new one at the first call; the node may read `keyspace` from now
  // on. kResourceExhausted: cluster.nodes_max members have a session; strangers do not count.
  absl::StatusOr<transport::SessionToken> Grant(const std::string& node, const KeyspaceId& keyspace,
                                                Who who = Who::kMember);

  // Returns the node whose session may read `keyspace`; none: there is no such session.
  std::optional<std::string> ReaderOf(const transport::SessionToken& token,
                                      const KeyspaceId& keyspace) const;

  // Ends the session of a node that has left. Its next request gets a new token.
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
