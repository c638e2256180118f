// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "crumb/v1/cache_service.pb.h"
#include "server/cluster/peer_table.h"
#include "server/cluster/run_finder.h"
#include "server/keyspaces/keyspace_registry.h"

namespace crumb::server {

// The parts that LocatePage works with; all outlive the call.
struct LocateContext {
  storage::TieredStore& store;
  const KeyspaceRegistry& keyspaces;
  PeerTable& peers;
  RunFinder& runs;
  const Clock& clock;
  const std::string& self;
};

// Fills in the homes of a page's run, and every node that has the page, for `crumb locate`. Without
// a keyspace in the request, uses the one in which this node has the page. kNotFound: it has it in
// none. All nodes are requested at once; a node that does not respond within a second is left out.
// `done` is called once.
void LocatePage(const LocateContext& context, const v1::LocatePageRequest& request,
                v1::LocatePageResponse* response, std::function<void(absl::Status)> done);

}  // namespace crumb::server
