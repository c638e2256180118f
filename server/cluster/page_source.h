// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "server/cluster/cluster_metrics.h"
#include "server/cluster/peer_budget.h"
#include "server/cluster/peer_sessions.h"
#include "server/keyspaces/keyspace_registry.h"
#include "storage/tiered_store.h"
#include "transport/fragment_source.h"

namespace crumb::server {

// Serves pages to other nodes, over every transport: checks the session, then leases in the store
// the requested pages until they are sent. A request counts against its node's budget until its
// response was sent or dropped, even if its call or connection ends before. Thread-safe. A request
// whose session may not read the keyspace, or that names a page twice, is refused; one beyond the
// node's budget gets kBusy for every page.
class PageSource final : public transport::FragmentSource {
 public:
  // The references must outlive this and every reply.
  PageSource(storage::TieredStore& store, const KeyspaceRegistry& keyspaces,
             const PeerSessions& sessions, ClusterMetrics& metrics, size_t reads_per_node_max)
      : store_(store),
        keyspaces_(keyspaces),
        sessions_(sessions),
        metrics_(metrics),
        reads_(reads_per_node_max) {}

  // Called on threads of the transport or of gRPC; does not block. `reply` is called once, possibly
  // before this returns or on a thread of the store.
  void Acquire(transport::SourceRequest request, Reply reply) override;

 private:
  storage::TieredStore& store_;
  const KeyspaceRegistry& keyspaces_;
  const PeerSessions& sessions_;
  ClusterMetrics& metrics_;
  PartyBudget reads_;  // requests, by node
};

}  // namespace crumb::server
