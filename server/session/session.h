// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "server/base/random_id.h"
#include "server/events/notice_queue.h"
#include "server/session/acquire_ledger.h"
#include "server/session/engine.h"
#include "server/session/slab_gate.h"
#include "server/session/staging_area.h"

namespace crumb::server {

// One process that shares memory with crumbd. Thread-safe; calls in progress keep it alive after it
// ended. SessionTable makes the transitions of its phase:
//
//   kOpen --Disconnect--> kDisconnected --Settle, End--> kEnded
//     |                                                    ^
//     '---------------------- End -------------------------'
//
//   kOpen          calls are served
//   kDisconnected  the process closed its connection but is still running and may read leased
//                  pages. It has no staging memory, and only calls that release are served. Settle
//                  ends the session when its engine has no lease and SessionMemory holds nothing
//   kEnded         the process exited, or has released everything. Its holds of leases have ended,
//                  and its token is not found any more
//
// Ownership: SessionTable holds a session until it has ended, and calls hold it while they run. The
// session holds its engine and its staging memory; the listener's Connection and the notice queue
// refer to it.
class Session {
 public:
  enum class Phase : uint8_t { kOpen, kDisconnected, kEnded };

  // `token` is the session's secret, `process_name` is printable ASCII for log lines, and `staging`
  // is null if the process requested no staging memory.
  Session(const RandomId& token, std::string process_name, std::shared_ptr<Engine> engine,
          std::shared_ptr<StagingArea> staging)
      : token_(token),
        process_name_(std::move(process_name)),
        engine_(std::move(engine)),
        staging_(std::move(staging)) {}

  // Returns the 128 bits with which the process's calls name the session. They are a secret:
  // a caller that sends them is taken for the process.
  const RandomId& token() const { return token_; }
  // Returns the name that the process gave itself; it is for log lines only and need not be unique.
  const std::string& process_name() const { return process_name_; }
  // Returns the engine that the process belongs to; it never changes and lives at least as long as
  // the session.
  Engine& engine() const { return *engine_; }
  // Returns the phase as it was at the moment of the call. A thread that gives the session a slot
  // or a lease must read the phase again afterwards and take the grant back if the session is no
  // longer open: SessionTable sets the phase before it looks for holds, so one of the two threads
  // sees the other's change.
  Phase phase() const { return phase_.load(); }
  // Returns the ledger of the Acquires whose responses may have been lost.
  AcquireLedger& acquires() { return acquires_; }

  // Counts a join of a lease of the session's engine. Returns false if the session has ended.
  bool NoteJoined(storage::LeaseId lease) {
    MutexLock lock(&mutex_);
    if (phase_.load() == Phase::kEnded) return false;
    ++joined_[lease];
    return true;
  }
  // Subtracts one such join. Returns false if there is none.
  bool TakeJoined(storage::LeaseId lease) {
    MutexLock lock(&mutex_);
    const auto found = joined_.find(lease);
    if (found == joined_.end()) return false;
    if (--found->second == 0) joined_.erase(found);
    return true;
  }
  // Removes and returns all joins, with one entry per join. REQUIRES: the phase is kEnded.
  std::vector<storage::LeaseId> TakeAllJoined() {
    MutexLock lock(&mutex_);
    std::vector<storage::LeaseId> all;
    for (const auto& [lease, times] : joined_) all.insert(all.end(), times, lease);
    joined_.clear();
    return all;
  }

  // REQUIRES: the caller is the SessionTable that has the session.
  // The table's lock is held, so transitions of one session never overlap.
  void SetPhase(Phase phase) { phase_.store(phase); }
  // Removes the staging memory, which no later call finds; returns null if there is none. Calls
  // that copy from it hold a reference of their own, so the memory is unmapped when the last of
  // them ends.
  std::shared_ptr<StagingArea> TakeStaging() {
    MutexLock lock(&mutex_);
    return std::move(staging_);
  }

  // Sets the object that grants slabs to the process. REQUIRES: the process has not received its
  // token.
  void SetSlabs(std::shared_ptr<SlabGate> slabs) {
    MutexLock lock(&mutex_);
    slabs_ = std::move(slabs);
  }
  // Returns that object; null if the process has all slabs, or SetSlabs was not called yet.
  std::shared_ptr<SlabGate> slabs() const {
    MutexLock lock(&mutex_);
    return slabs_;
  }

  // Returns the staging memory; null if there is none or the session is no longer open.
  std::shared_ptr<StagingArea> staging() const {
    MutexLock lock(&mutex_);
    return staging_;
  }

  // Returns the queue of the session's stream; null if no stream is open.
  std::shared_ptr<NoticeQueue> notices() const {
    MutexLock lock(&mutex_);
    return notices_;
  }
  // Sets the queue of a new stream. Returns false if a stream is open already.
  bool OpenNotices(std::shared_ptr<NoticeQueue> notices) {
    MutexLock lock(&mutex_);
    if (notices_ != nullptr) return false;
    notices_ = std::move(notices);
    return true;
  }
  // Removes the queue when its stream has ended; a new stream may be opened afterwards.
  void CloseNotices() {
    MutexLock lock(&mutex_);
    notices_ = nullptr;
  }

 private:
  const RandomId token_;
  const std::string process_name_;
  const std::shared_ptr<Engine> engine_;
  // Atomic, because calls read it without the lock of the table that sets it.
  std::atomic<Phase> phase_{Phase::kOpen};
  AcquireLedger acquires_;
  // Guards the members below. No other lock is taken while it is held.
  mutable Mutex mutex_;
  std::shared_ptr<SlabGate> slabs_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<StagingArea> staging_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<NoticeQueue> notices_ ABSL_GUARDED_BY(mutex_);
  // Number of this session's joins of each lease of its engine; no entry is 0.
  std::unordered_map<storage::LeaseId, size_t> joined_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
