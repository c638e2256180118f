// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "common/executor.h"
#include "server/base/limits.h"
#include "server/calls/call_context.h"
#include "server/device/device_pools.h"
#include "server/events/event_hub.h"
#include "server/keyspaces/keyspace_registry.h"
#include "server/metrics/server_metrics.h"
#include "server/session/session_table.h"
#include "server/tenants/tenant_table.h"
#include "storage/tiered_store.h"
#include "tests/histories/disk.h"
#include "tests/histories/history.h"

namespace crumb::histories {

// The names of the tenants in the file that WriteTenants makes. The last one has a quota.
std::string TenantName(int tenant);
inline constexpr uint64_t kQuotaBytes = uint64_t{1'200'000};
// Writes the tenants' file into a folder and returns its path.
std::string WriteTenants(const std::string& folder);

// Bounds that histories reach.
server::Limits NodeLimits();
server::SessionLimits NodeSessionLimits();
server::PoolOptions NodePoolOptions();

// All of crumbd below gRPC and sockets, put together as the daemon does it. Calls of gRPC's threads
// run on `callers`, the work of the sessions' thread on `listener`.
class Node {
 public:
  Node(const Profile& profile, Disk& disk, const std::string& tenants_file,
       storage::DeletionEpochs epochs, std::unique_ptr<storage::HandedOverMemory> handed_over);
  ~Node();

  // Stops in a daemon's order: no more calls, then the queued work, then the store.
  void Stop(Duration grace);
  // Stops and hands its memory over.
  std::unique_ptr<storage::HandedOverMemory> HandOver();

  // Returns the context of a call on behalf of a tenant.
  server::CallContext ContextOf(int tenant);

  const server::Limits limits;
  const server::SessionLimits session_limits;
  server::ServerMetrics metrics;
  server::EventHub events;
  std::unique_ptr<server::TenantTable> tenants;
  std::unique_ptr<storage::TieredStore> store;
  std::unique_ptr<server::KeyspaceRegistry> keyspaces;
  std::unique_ptr<server::SessionTable> sessions;
  std::unique_ptr<server::DevicePools> pools;
  std::unique_ptr<Executor> commits;
  std::unique_ptr<Executor> control;
  std::unique_ptr<Executor> callers;
  std::unique_ptr<Executor> listener;

 private:
  void NotifySlabGone(uint32_t slab);

  bool stopped_ = false;
};

}  // namespace crumb::histories
