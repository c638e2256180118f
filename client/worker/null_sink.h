// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "client/worker/page_sink.h"
#include "client/worker/worker_tally.h"

namespace crumb::client {

// Drops every page, for a worker without crumbd.
class NullSink final : public PageSink {
 public:
  // `tally` is borrowed.
  explicit NullSink(WorkerTally& tally) : tally_(tally) {}

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
