// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/tenant_budget.h"
#include "server/base/limits.h"
#include "server/metrics/server_metrics.h"
#include "server/session/session.h"
#include "server/session/session_memory.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// The sessions and engines of this node. It makes the transitions of Session::Phase and ends the
// leases, reservations and staging memory that end with them. FdListener opens sessions and reports
// when a process closes its connection or exits; this table uses no sockets. Thread-safe.
//
// Locks: mutex_ guards both maps. Memory is unmapped, and leases are ended in the store, without
// it, because both take time in their size.
class SessionTable {
 public:
  struct OpenRequest {
    std::string process_name;
    std::string engine;  // 16 random bytes that all its processes send; empty: a new engine
    unsigned uid = 0;
    uint64_t staging_bytes = 0;  // size that the process requests
    std::string tenant;          // empty if it has none
  };
  struct Totals {
    size_t sessions = 0;
    size_t engines = 0;
    size_t leases = 0;
    uint64_t leased_pages = 0;
    size_t reservations = 0;
    uint64_t staging_bytes = 0;
  };

  // `part_max_percent` limits one tenant's part of sessions, engines and staging memory
  // (TenantBudget). The references must outlive this.
  SessionTable(const SessionLimits& limits, storage::TieredStore& store, ServerMetrics& metrics,
               int64_t part_max_percent = 100)
      : limits_(limits),
        store_(store),
        metrics_(metrics),
        session_budget_(static_cast<uint64_t>(limits.sessions_max), part_max_percent),
        engine_budget_(static_cast<uint64_t>(limits.engines_max), part_max_percent),
        staging_budget_(limits.staging_total_bytes_max.value, part_max_percent) {}

  // Sets the function that is called, on any thread, after Settle has ended sessions. REQUIRES: it
  // is called before all other methods.
  void OnEnded(std::function<void()> ended) { ended_ = std::move(ended); }

  // Sets the object that is notified of sessions that end. It must outlive all calls. REQUIRES: it
  // is called before all other methods.
  void SetMemory(SessionMemory* memory) { memory_ = memory; }

  // kInvalidArgument: the engine's id has a wrong size; kNotFound: another user's or tenant's
  // engine has it; kResourceExhausted: too many sessions, engines or staging memory.
  absl::StatusOr<std::shared_ptr<Session>> Open(const OpenRequest& request);

  // Returns the session of a token; null if there is none.
  std::shared_ptr<Session> Find(std::string_view token) const;

  // Handles a process that closed its connection but is still running (kOpen -> kDisconnected):
  // frees its staging memory and reservations. The session ends as soon as its engine has no lease,
  // because until then the process may read leased pages.
  void Disconnect(const std::shared_ptr<Session>& session);

  // Handles the exit of a process (-> kEnded): the leases that it acquired or joined end unless
  // other sessions joined them, and all leases end with the engine's last process. Idempotent.
  void End(const std::shared_ptr<Session>& session);

  // Adds a hold of a lease of the session's engine. The hold ends with Release or with the process.
  // Returns false if the engine has no such lease, or the session has ended.
  bool Join(Session& session, storage::LeaseId lease);

  // Ends the session's hold of a lease of its engine; the lease ends with its last hold. Returns
  // false if the engine has no such lease.
  bool Release(Session& session, storage::LeaseId lease);

  // Handles the end of the session's stream: no request can be sent to the process any more.
  void NoteStreamEnd(const Session& session);
  // Handles the release of memory (SessionMemory): ends a disconnected session that holds nothing.
  void NoteLetGo(const Session& session);

  Totals totals() const;
  std::vector<std::shared_ptr<Session>> List() const;

 private:
  struct EngineEntry {
    std::shared_ptr<Engine> engine;
    size_t sessions = 0;
    size_t disconnected = 0;  // number of these sessions that are disconnected
  };

  // Takes a session's places in the budgets, or none of them.
  absl::Status TakeRoomLocked(const std::string& tenant, uint64_t staging_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Engine>> JoinLocked(const OpenRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Memory and leases of ended sessions. They are freed without the lock, because that takes time
  // in their size: unmapping 256 MiB of staging memory takes some 10 ms.
  struct Remains {
    Engine::Ended ended;
    std::vector<std::shared_ptr<StagingArea>> staging;
  };
  void RemoveLocked(Session& session, Remains* remains) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeStagingLocked(Session& session, Remains* remains) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the disconnected sessions of an engine without leases that hold nothing else.
  void Settle(const Engine& engine);
  // Ends the leases in the store.
  void Release(const Remains& remains);

  const SessionLimits limits_;
  storage::TieredStore& store_;
  ServerMetrics& metrics_;
  TenantBudget session_budget_;
  TenantBudget engine_budget_;
  TenantBudget staging_budget_;
  std::function<void()> ended_ = [] {};
  SessionMemory* memory_ = nullptr;  // null: sessions have no other memory

  mutable Mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, EngineEntry> engines_ ABSL_GUARDED_BY(mutex_);
  std::atomic<size_t> disconnected_{0};  // spares Release the lock
};

}  // namespace crumb::server
