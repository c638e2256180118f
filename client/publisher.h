// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/page_reader.h"
#include "client/page_sink.h"
#include "client/worker_tally.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "crumb/client.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// Brings complete pages into staging memory, with the sums of their tiles, and commits them, on one
// thread behind a bounded queue. Pages that find no place are dropped and counted. Thread-safe.
class Publisher final : public PageSink {
 public:
  // All borrowed. `refused` is called on the thread when crumbd refused a page: what is known of
  // the keyspace may be out of date.
  Publisher(const WorkerOptions& options, Client& client, PageReader& reader, WorkerTally& tally,
            std::function<void()> refused);
  // Drops what is queued.
  ~Publisher() override;

  void Publish(std::shared_ptr<const KeyspaceBinding> keyspace,
               std::shared_ptr<const Page> page) override;
  void NoteRefusedWindow() override;
  void NoteQuality(std::span<const QualitySample> layers) override;

  // Runs `task` on the thread, soon; drops it when it cannot or when one is waiting.
  void RunSoon(std::function<void()> task);

  // Waits until what is queued now was published or dropped. kDeadlineExceeded.
  absl::Status WaitIdle(Duration timeout);

 private:
  struct Item {
    std::shared_ptr<const KeyspaceBinding> keyspace;
    std::shared_ptr<const Page> page;
  };

  void Run();
  void EnsureStarted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<Item> TakeBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishBatch(const std::vector<Item>& batch);
  absl::Status Write(std::span<const Item> items, std::span<const StagingSlot> slots) const;
  FragmentHeader HeaderOf(const Item& item, std::vector<uint32_t> sums) const;
  void CountOutcome(CommitOutcome outcome, size_t bytes);
  void CountFailure(const absl::Status& status, size_t pages);
  void CountDropped(Counter& counter, size_t pages);

  const WorkerOptions& options_;
  Client& client_;
  PageReader& reader_;
  WorkerTally& tally_;
  const std::function<void()> refused_;
  const pid_t pid_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> task_ ABSL_GUARDED_BY(mutex_);
  uint64_t queued_ ABSL_GUARDED_BY(mutex_) = 0;  // pages ever queued
  uint64_t done_ ABSL_GUARDED_BY(mutex_) = 0;    // of them, published or dropped
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::client
