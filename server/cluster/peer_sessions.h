// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/page_key.h"
#include "transport/fetch.h"

namespace crumb::server {

// What other nodes may fetch: each has one session, whose token it got on the control plane, and
// may read the keyspaces that it named there. Thread-safe.
class PeerSessions {
 public:
  explicit PeerSessions(size_t nodes_max) : nodes_max_(nodes_max) {}

  // The token of `node`, which may read `keyspace` from now on. kResourceExhausted: too many nodes.
  absl::StatusOr<transport::SessionToken> Grant(const std::string& node,
                                                const KeyspaceId& keyspace);

  bool MayRead(const transport::SessionToken& token, const KeyspaceId& keyspace) const;

  // The node has left.
  void Forget(const std::string& node);

 private:
  struct Session {
    std::string node;
    std::set<KeyspaceId> keyspaces;
  };

  const size_t nodes_max_;
  mutable Mutex mutex_;
  std::map<transport::SessionToken, Session> sessions_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, transport::SessionToken> tokens_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
