// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "client/worker/worker_tally.h"
#include "crumb/counters.h"

namespace crumb::client {

// PagePublisher makes complete pages visible to other workers.
//
// A page that is queued must not change any more, and its key must be final. Sequences hold the
// interface, so that a worker without crumbd runs the same code.
class PagePublisher {
 public:
  virtual ~PagePublisher() = default;

  // Queues a page for publishing, or drops and counts it. Does not block. Thread-safe.
  virtual void Publish(std::shared_ptr<const KeyspaceBinding> keyspace,
                       std::shared_ptr<const Page> page) = 0;

  // Queues loaded pages, which crumbd has elsewhere, to be made visible in the device pool that
  // they were loaded to; or drops and counts them. Does not block. Thread-safe.
  virtual void PublishInPlace(std::shared_ptr<const KeyspaceBinding> keyspace,
                              std::vector<std::shared_ptr<const Page>> pages) = 0;

  // Counts a window that is not published because it has a non-finite row. Does not block.
  // Thread-safe.
  virtual void NoteRefusedWindow() = 0;

  // Reports the samples of one window that the quality watch measured. Does not block. Thread-safe.
  virtual void NoteQuality(std::span<const QualitySample> layers) = 0;
};

// NullPublisher drops every page; for a worker without crumbd.
class NullPublisher final : public PagePublisher {
 public:
  // `tally` is borrowed.
  explicit NullPublisher(WorkerTally& tally) : tally_(tally) {}

  void Publish(std::shared_ptr<const KeyspaceBinding>, std::shared_ptr<const Page>) override {
    tally_.publish_dropped_unavailable.Add();
  }
  void PublishInPlace(std::shared_ptr<const KeyspaceBinding>,
                      std::vector<std::shared_ptr<const Page>>) override {}
  void NoteRefusedWindow() override { tally_.windows_refused.Add(); }
  void NoteQuality(std::span<const QualitySample>) override { tally_.windows_measured.Add(); }

 private:
  WorkerTally& tally_;
};

}  // namespace crumb::client
