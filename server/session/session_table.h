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
// when a process closes its connection or exits; this table uses no sockets. The daemon owns it.
// Any thread may call it.
//
// Locks: mutex_ guards both maps. It is taken before the locks of Session, Engine and
// SessionMemory, never after one of them. Memory is unmapped, and leases are ended in the store,
// without it, because both take time in their size.
//
// Budgets: a session takes one place of sessions_max and its staging bytes of
// staging_total_bytes_max from Open until it leaves kOpen (staging) or ends (place); an engine
// takes one place of engines_max from its first session to the end of its last.
class SessionTable {
 public:
  // The fields of a process's hello that a session is made of, already checked by ReadHello.
  struct OpenRequest {
    // Printable name of the process, for log lines.
    std::string process_name;
    std::string engine;  // 16 random bytes that all its processes send; empty: a new engine
    // Numeric user id of the process, from the kernel's credentials of its socket.
    unsigned uid = 0;
    // Open grants at most sessions.staging_bytes_max of it, in multiples of 4,096 bytes; 0: none.
    uint64_t staging_bytes = 0;  // size that the process requests
    std::string tenant;          // empty if it has none
  };
  // Sums over all sessions and engines, for metrics and the status page.
  struct Totals {
    size_t sessions = 0;
    size_t engines = 0;
    size_t leases = 0;
    // Pages of leases, including those that Acquires in progress have taken from their engines'
    // budgets.
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
  // engine has it; kResourceExhausted: too many sessions, engines or staging memory. kUnavailable:
  // an id collided, and the caller may try again; errors of creating the staging memory are passed
  // on. The caller ends the session with End, also if it cannot deliver the token.
  absl::StatusOr<std::shared_ptr<Session>> Open(const OpenRequest& request);

  // Returns the session of a token; null if there is none. The comparison takes a time that does
  // not depend on the bytes. The session may be disconnected, and may end while the caller uses it.
  std::shared_ptr<Session> Find(std::string_view token) const;

  // Handles a process that closed its connection but is still running (kOpen -> kDisconnected):
  // frees its staging memory and reservations. The session ends as soon as its engine has no lease,
  // because until then the process may read leased pages. Does nothing in other phases.
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
  // Returns all sessions that have not ended, in no order.
  std::vector<std::shared_ptr<Session>> List() const;

 private:
  // An engine and the number of sessions that refer to it; the entry goes with the last of them.
  struct EngineEntry {
    std::shared_ptr<Engine> engine;
    size_t sessions = 0;
    size_t disconnected = 0;  // number of these sessions that are disconnected
  };

  // Takes a session's places in the budgets, or none of them. kResourceExhausted names the setting
  // that is exhausted.
  absl::Status TakeRoomLocked(const std::string& tenant, uint64_t staging_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the engine that the request names, or a new one, for which it takes a place in the
  // budget. The caller counts the session in the engine's entry.
  absl::StatusOr<std::shared_ptr<Engine>> JoinLocked(const OpenRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Memory and leases of ended sessions. They are freed without the lock, because that takes time
  // in their size: unmapping 256 MiB of staging memory takes some 10 ms.
  struct Remains {
    Engine::Ended ended;
    std::vector<std::shared_ptr<StagingArea>> staging;
  };
  // Makes the transition to kEnded: takes the session out of the maps, returns its budgets, and
  // moves all that is left to free into `remains`. REQUIRES: the session has not ended, and the
  // caller holds a reference to it.
  void RemoveLocked(Session& session, Remains* remains) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Moves the session's staging memory, if it has any, into `remains` and returns its bytes to the
  // budget.
  void TakeStagingLocked(Session& session, Remains* remains) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the disconnected sessions of an engine without leases that hold nothing else. Called
  // whenever a lease of the engine ends or one of its processes lets go of memory.
  void Settle(const Engine& engine);
  // Ends the leases in the store and counts them as reaped.
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
