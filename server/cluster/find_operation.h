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
#include "server/cluster/referral_trail.h"

namespace crumb::server {

// One RemoteReader::Find: asks the homes of every run that lacks pages which of them they have, one
// call a node and all at once; follows their referrals (referral_trail.h); ends when the prefix's
// end is known. Nothing is leased or moved.
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
    size_t unanswered = 0;      // homes that were asked, or whose referrals are being followed
    size_t hits = 0;            // of `pages`, the longest prefix that a node has told of
    std::string node;           // that node
    storage::MissReason reason = storage::MissReason::kAbsent;  // of the page behind it
  };

  using Answer = absl::StatusOr<v1::PeerAcquireResponse>;

  // Fills runs_ and returns their keys.
  std::vector<PageKey> FindRuns();
  void Ask(const HomeQuestion& question);
  void AskTrail(const TrailQuestion& question);
  void Send(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
            const std::function<void(v1::PeerAcquireRequest&)>& complete,
            std::function<void(const Answer&)> then);
  void Answered(const HomeQuestion& question, const Answer& answer);
  void AnsweredTrail(const TrailQuestion& question, const Answer& answer);
  void NoteAnswer(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                  const Answer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Proceed(std::vector<ReferralTrail> trails);
  void EndTrail(const ReferralTrail& trail);
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
