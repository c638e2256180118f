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
#include "common/random_id.h"
#include "server/events/notice_queue.h"
#include "server/session/acquire_ledger.h"
#include "server/session/engine.h"
#include "server/session/slab_gate.h"
#include "server/session/staging_area.h"

namespace crumb::server {

// One process that shares memory with crumbd. Thread-safe; calls in progress keep it alive after it
// ended.
class Session {
 public:
  // kOpen: calls are served. kDisconnected: the process closed its connection but lives; it can
  // only release. kEnded: it is gone.
  enum class Phase : uint8_t { kOpen, kDisconnected, kEnded };

  Session(const RandomId& token, std::string process_name, std::shared_ptr<Engine> engine,
          std::shared_ptr<StagingArea> staging)
      : token_(token),
        process_name_(std::move(process_name)),
        engine_(std::move(engine)),
        staging_(std::move(staging)) {}

  const RandomId& token() const { return token_; }
  const std::string& process_name() const { return process_name_; }
  Engine& engine() const { return *engine_; }
  Phase phase() const { return phase_.load(); }
  AcquireLedger& acquires() { return acquires_; }

  // Notes that the session joined a lease of its engine. False: the session has ended.
  bool NoteJoined(storage::LeaseId lease) {
    MutexLock lock(&mutex_);
    if (phase_.load() == Phase::kEnded) return false;
    ++joined_[lease];
    return true;
  }
  // Takes one such note back. False: there is none.
  bool TakeJoined(storage::LeaseId lease) {
    MutexLock lock(&mutex_);
    const auto found = joined_.find(lease);
    if (found == joined_.end()) return false;
    if (--found->second == 0) joined_.erase(found);
    return true;
  }
  // All notes, one entry each, once the phase is kEnded.
  std::vector<storage::LeaseId> TakeAllJoined() {
    MutexLock lock(&mutex_);
    std::vector<storage::LeaseId> all;
    for (const auto& [lease, times] : joined_) all.insert(all.end(), times, lease);
    joined_.clear();
    return all;
  }

  // Called by the table that holds the session.
  void SetPhase(Phase phase) { phase_.store(phase); }
  std::shared_ptr<StagingArea> TakeStaging() {
    MutexLock lock(&mutex_);
    return std::move(staging_);
  }

  // How the process gets slabs; null: it has them all. Set before the process knows its token.
  void SetSlabs(std::shared_ptr<SlabGate> slabs) { slabs_ = std::move(slabs); }
  SlabGate* slabs() const { return slabs_.get(); }

  // Null without staging memory, and once the session is no longer open.
  std::shared_ptr<StagingArea> staging() const {
    MutexLock lock(&mutex_);
    return staging_;
  }

  // The queue of the session's stream; null when none is open.
  std::shared_ptr<NoticeQueue> notices() const {
    MutexLock lock(&mutex_);
    return notices_;
  }
  // False: a stream is open already.
  bool OpenNotices(std::shared_ptr<NoticeQueue> notices) {
    MutexLock lock(&mutex_);
    if (notices_ != nullptr) return false;
    notices_ = std::move(notices);
    return true;
  }
  void CloseNotices() {
    MutexLock lock(&mutex_);
    notices_ = nullptr;
  }

 private:
  const RandomId token_;
  const std::string process_name_;
  const std::shared_ptr<Engine> engine_;
  std::atomic<Phase> phase_{Phase::kOpen};
  AcquireLedger acquires_;
  std::shared_ptr<SlabGate> slabs_;
  mutable Mutex mutex_;
  std::shared_ptr<StagingArea> staging_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<NoticeQueue> notices_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<storage::LeaseId, size_t> joined_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
