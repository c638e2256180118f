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

// Where complete pages go to become visible to others.
class PagePublisher {
 public:
  virtual ~PagePublisher() = default;

  // Takes a page to publish, or drops and counts it. Never blocks. Thread-safe.
  virtual void Publish(std::shared_ptr<const KeyspaceBinding> keyspace,
                       std::shared_ptr<const Page> page) = 0;

  // Makes loaded pages visible where they lie, which crumbd has elsewhere; or drops and counts
  // them. Never blocks. Thread-safe.
  virtual void Place(std::shared_ptr<const KeyspaceBinding> keyspace,
                     std::vector<std::shared_ptr<const Page>> pages) = 0;

  // Notes that a window is kept back because it holds a non-finite row. Never blocks. Thread-safe.
  virtual void NoteRefusedWindow() = 0;

  // Reports what the quality watch measured of one window. Never blocks. Thread-safe.
  virtual void NoteQuality(std::span<const QualitySample> layers) = 0;
};

// Drops every page, for a worker without crumbd.
class NullPublisher final : public PagePublisher {
 public:
  // `tally` is borrowed.
  explicit NullPublisher(WorkerTally& tally) : tally_(tally) {}

  void Publish(std::shared_ptr<const KeyspaceBinding>, std::shared_ptr<const Page>) override {
    tally_.publish_dropped_unavailable.Add();
  }
  void Place(std::shared_ptr<const KeyspaceBinding>,
             std::vector<std::shared_ptr<const Page>>) override {}
  void NoteRefusedWindow() override { tally_.windows_refused.Add(); }
  void NoteQuality(std::span<const QualitySample>) override { tally_.windows_measured.Add(); }

 private:
  WorkerTally& tally_;
};

}  // namespace crumb::client
