// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "server/cluster/home_questions.h"

namespace crumb::server {

// One RemoteReader::Find: asks the homes of every run that lacks pages which of them they have, one
// call a node and all at once; ends when the prefix's end is known. Nothing is leased or moved.
// Lives as long as a callback refers to it. Thread-safe.
class FindOperation : public std::enable_shared_from_this<FindOperation> {
 public:
  using Done = std::function<void(FoundPages)>;

  FindOperation(const PullContext& context, PullRequest request, Done done);

  void Start();

 private:
  // Pages of one run that this node lacks.
  struct Run {
    PageKey key;
    std::vector<size_t> pages;  // indices into request_.keys
    size_t unanswered = 0;      // nodes that were asked
    size_t hits = 0;            // of `pages`, the longest prefix that a node has told of
    std::string node;           // that node
    storage::MissReason reason = storage::MissReason::kAbsent;  // of the page behind it
  };

  void Ask(const HomeQuestion& question);
  void Answered(const HomeQuestion& question,
                const absl::StatusOr<v1::PeerAcquireResponse>& answer);
  void NoteAnswer(const HomeQuestion& question, const v1::PeerAcquireResponse& answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the wait when the end of the prefix is known, or `late`.
  void Finish(bool late);
  // Returns the pages found so far; none: a node may still report the next page.
  std::optional<FoundPages> Known(bool late) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const PullContext& context_;
  const PullRequest request_;
  const std::vector<std::optional<storage::Tier>> here_;

  mutable Mutex mutex_;
  Done done_ ABSL_GUARDED_BY(mutex_);
  std::vector<Run> runs_ ABSL_GUARDED_BY(mutex_);
  std::optional<storage::DeadlineTimer::Id> timer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
