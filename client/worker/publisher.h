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
#include "client/worker/page_publisher.h"
#include "client/worker/page_reader.h"
#include "client/worker/shared_pages.h"
#include "client/worker/worker_tally.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "crumb/client.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// Publisher commits complete pages: in place, if other workers can read the memory where they are,
// and through staging memory, with the checksums of their tiles. It does so on one thread behind
// bounded queues, and drops and counts pages for which there is no room. Thread-safe.
//
// The way of a page, on the thread "crumb-publish" (started by the first page or task):
//     queue --> CommitInPlace (page in a device pool) --> Reserve --> Read, header --> Commit
//
// A batch has up to publish_batch pages of one keyspace and one size. It is committed in parts of
// about 1 MiB, so that crumbd copies a part while the next one is written. Two queues are bounded:
// publish_queue_max pages that this worker made, 65,536 loaded ones, which are served when the
// first is empty.
//
// An error drops the rest of the batch and counts it: kResourceExhausted as no room, kNotFound and
// kInvalidArgument as refused, all others as unavailable. In a forked child every call does
// nothing.
class Publisher final : public PagePublisher {
 public:
  // Everything is borrowed. `shared` may be null, which means that no page can be committed in
  // place. `refused` is called on the thread when crumbd refused a page, because the keyspace
  // binding may be stale.
  Publisher(const WorkerOptions& options, Client& client, PageReader& reader, SharedPages* shared,
            WorkerTally& tally, std::function<void()> refused);
  // Drops all queued pages.
  ~Publisher() override;

  void Publish(std::shared_ptr<const KeyspaceBinding> keyspace,
               std::shared_ptr<const Page> page) override;
  void PublishInPlace(std::shared_ptr<const KeyspaceBinding> keyspace,
                      std::vector<std::shared_ptr<const Page>> pages) override;
  void NoteRefusedWindow() override;
  void NoteQuality(std::span<const QualitySample> layers) override;

  // Runs `task` on the thread; drops it if another task is waiting or the thread cannot run it.
  // There is room for one waiting task: tasks are requests that the next event repeats, such as
  // recording a state.
  void RunSoon(std::function<void()> task);

  // Blocks until the pages that are queued now were published or dropped. kDeadlineExceeded: not
  // within `timeout`.
  absl::Status WaitIdle(Duration timeout);

 private:
  // A queued page.
  struct Item {
    std::shared_ptr<const KeyspaceBinding> keyspace;
    std::shared_ptr<const Page> page;
    bool loaded = false;  // the page was fetched, so that crumbd has it elsewhere
  };

  // The thread: takes a task and a batch at a time, until the destructor stops it.
  void Run();
  // Starts the thread, the first time, and wakes it.
  void EnsureStarted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes and returns the pages of the next batch: of one keyspace and size, publish_batch at
  // most.
  std::vector<Item> TakeBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void TakeSome(std::deque<Item>& from, size_t most, std::vector<Item>* batch);
  // Publishes a batch, and counts every page of it as published, known, refused or dropped.
  void PublishBatch(std::vector<Item> batch);
  // Returns the pages that are still to be published through staging memory.
  std::vector<Item> CommitInPlace(std::vector<Item> batch);
  // Writes pages of one batch to their slots and commits them in parts: crumbd copies a part while
  // the next one is written. Adds the number of pages whose outcomes were counted to `counted`,
  // with an error too. REQUIRES: there is a slot for every item, and one at least.
  absl::Status WriteAndCommit(std::span<const Item> items, std::vector<StagingSlot> slots,
                              size_t* counted);
  // Returns the header of a page's fragment: this rank's tiles with these checksums.
  FragmentHeader HeaderOf(const Item& item, std::vector<uint32_t> sums) const;
  // Count pages by crumbd's outcome, by the error of a call, or as dropped; refusals call
  // `refused_`.
  void CountOutcome(CommitOutcome outcome, size_t bytes);
  void CountFailure(const absl::Status& status, size_t pages);
  void CountDropped(Counter& counter, size_t pages);

  const WorkerOptions& options_;
  Client& client_;
  PageReader& reader_;
  SharedPages* const shared_;
  WorkerTally& tally_;
  const std::function<void()> refused_;
  const pid_t pid_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  std::deque<Item> loaded_ ABSL_GUARDED_BY(mutex_);  // served when `queue_` is empty
  std::function<void()> task_ ABSL_GUARDED_BY(mutex_);
  uint64_t queued_ ABSL_GUARDED_BY(mutex_) = 0;  // number of pages queued since the start
  // number of queued pages that were published or dropped
  uint64_t done_ ABSL_GUARDED_BY(mutex_) = 0;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::client
