// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Names of this node.
struct NodeInfo {
  std::string id;
  std::string version;
  std::string address;  // address of gRPC over TCP, or the Unix socket
  TimePoint started;
};

// Fills in the response to Stats: tiers, counters, and the keyspaces that the caller may see. Costs
// a walk over all keyspaces.
void FillStats(const CallContext& context, const NodeInfo& node, v1::StatsResponse* response);
// Fills in the response to ListNodes: the nodes of the cluster's view, or this node alone.
void FillNodes(const CallContext& context, const NodeInfo& node, v1::ListNodesResponse* response);

}  // namespace crumb::server
