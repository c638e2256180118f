// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/cluster/home_inquiry.h"

namespace crumb::server {

// One RemoteReader::Find: finds the nodes that have the pages; ends when the prefix's end is known.
// Nothing is leased or moved. Thread-safe.
class FindOperation final : public HomeInquiry {
 public:
  using Done = std::function<void(FoundPages)>;

  FindOperation(const PullContext& context, PullRequest request, Done done);

  void Start();

 private:
  // The longest prefix of a run's pages that a node has reported.
  struct Found {
    size_t hits = 0;
    std::string node;
  };

  void FindRuns();
  void Prepare(v1::PeerAcquireRequest*) const override {}
  void NoteHits(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                const v1::PeerAcquireResponse& response) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Wants(size_t) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return done_ != nullptr;
  }
  void Progress(const std::vector<size_t>&) override { Finish(false); }
  // Ends the wait when the end of the prefix is known, or `late`.
  void Finish(bool late);
  // Returns the pages found so far; none: a node may still report the next page.
  std::optional<FoundPages> Known(bool late) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<std::optional<Tier>> here_;
  Done done_ ABSL_GUARDED_BY(mutex_);
  std::vector<Found> found_ ABSL_GUARDED_BY(mutex_);  // [runs_] the best result of each run
  std::optional<storage::DeadlineTimer::Id> timer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
