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

// Sessions and engines, and what ends with them. Knows no sockets. Thread-safe.
class SessionTable {
 public:
  struct OpenRequest {
    std::string process_name;
    std::string engine;  // 16 random bytes that its processes agreed on; empty: one of its own
    unsigned uid = 0;
    uint64_t staging_bytes = 0;  // wanted
    std::string tenant;          // empty: none
  };
  struct Totals {
    size_t sessions = 0;
    size_t engines = 0;
    size_t leases = 0;
    uint64_t leased_pages = 0;
    size_t reservations = 0;
    uint64_t staging_bytes = 0;
  };

  // `part_max_percent`: of sessions, engines and staging memory, for one tenant (TenantBudget). The
  // references must outlive this.
  SessionTable(const SessionLimits& limits, storage::TieredStore& store, ServerMetrics& metrics,
               int64_t part_max_percent = 100)
      : limits_(limits),
        store_(store),
        metrics_(metrics),
        session_budget_(static_cast<uint64_t>(limits.sessions_max), part_max_percent),
        engine_budget_(static_cast<uint64_t>(limits.engines_max), part_max_percent),
        staging_budget_(limits.staging_total_bytes_max.value, part_max_percent) {}

  // Called, on any thread, after sessions ended otherwise than by End. Set before use.
  void OnEnded(std::function<void()> ended) { ended_ = std::move(ended); }

  // Sets the object that is notified of sessions that end, from now on; outlives the calls here.
  // Set before use.
  void SetMemory(SessionMemory* memory) { memory_ = memory; }

  // kInvalidArgument: the engine's id has a wrong size; kNotFound: another user's or tenant's
  // engine has it; kResourceExhausted: too many sessions, engines or staging memory.
  absl::StatusOr<std::shared_ptr<Session>> Open(const OpenRequest& request);

  // The session of a token; null when there is none.
  std::shared_ptr<Session> Find(std::string_view token) const;

  // The process closed its connection but lives: staging memory and reservations go; the session
  // ends as soon as its engine holds no lease, because the process may be reading leased pages.
  void Disconnect(const std::shared_ptr<Session>& session);

  // The process is gone: the leases that it acquired or joined end unless other sessions joined
  // them; all leases end with their engine's last process. Idempotent.
  void End(const std::shared_ptr<Session>& session);

  // The session holds a lease of its engine too, until it releases it or its process is gone.
  // False: the engine has no such lease, or the session has ended.
  bool Join(Session& session, storage::LeaseId lease);

  // Gives up what the session holds of a lease of its engine; the last holder ends the lease.
  // False: the engine has no such lease.
  bool Release(Session& session, storage::LeaseId lease);

  // The session's stream has ended: no request can be sent to it.
  void NoteStreamEnd(const Session& session);
  // The session holds less than before: ends it if it is disconnected and holds nothing.
  void NoteLetGo(const Session& session);

  Totals totals() const;
  std::vector<std::shared_ptr<Session>> List() const;

 private:
  struct EngineEntry {
    std::shared_ptr<Engine> engine;
    size_t sessions = 0;
    size_t disconnected = 0;  // of them
  };

  // Takes a session's places in the budgets, or none of them.
  absl::Status TakeRoomLocked(const std::string& tenant, uint64_t staging_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Engine>> JoinLocked(const OpenRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Memory and leases that ended sessions leave behind. To free them takes time in their size: to
  // unmap 256 MiB of staging memory, some 10 ms. So that happens without the lock.
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
  SessionMemory* memory_ = nullptr;  // null: processes hold no more than is known here

  mutable Mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, EngineEntry> engines_ ABSL_GUARDED_BY(mutex_);
  std::atomic<size_t> disconnected_{0};  // spares Release the lock
};

}  // namespace crumb::server
