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
#include "server/cluster/page_fetch.h"
#include "server/cluster/referral_trail.h"
#include "server/cluster/remote_reader.h"

namespace crumb::server {

// One RemoteReader::Pull: asks the homes of every run that lacks pages, one call a node and all at
// once; follows their referrals to other nodes (referral_trail.h); fetches a run as soon as a node
// has all of it or every home and every node that they referred to has answered; ends when the
// prefix's end is known. Lives as long as a callback refers to it. Thread-safe.
class PullOperation : public std::enable_shared_from_this<PullOperation> {
 public:
  using Done = std::function<void(PullResult)>;

  PullOperation(const PullContext& context, PullRequest request, Done done);

  void Start();

 private:
  enum class PageState : uint8_t { kOpen, kHere, kMissing };

  // A lease at a peer, given back with the last reference.
  struct Lease;

  // Pages of one run that this operation brings.
  struct Run {
    PageKey key;
    std::vector<size_t> pages;  // indices into request_.keys
    size_t unanswered = 0;      // homes that were asked, or whose referrals are being followed
    bool fetching = false;
    // The longest prefix that a home has told of so far.
    std::shared_ptr<Peer> from;
    std::shared_ptr<Lease> lease;
    transport::SessionToken session{};
    std::vector<uint32_t> tile_bytes;
    storage::MissReason reason = storage::MissReason::kAbsent;  // of the page behind it
  };

  void ClaimPages();
  using Answer = absl::StatusOr<v1::PeerAcquireResponse>;

  // Returns the questions to homes, and the trails of runs that this node is a home of itself.
  std::vector<HomeQuestion> MakeQuestions(std::vector<ReferralTrail>* own);
  void Ask(const HomeQuestion& question);
  void AskTrail(const TrailQuestion& question);
  // Asks `peer` for `runs`; `then` is called once, on a thread of the executor.
  void Send(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
            const std::function<void(v1::PeerAcquireRequest&)>& complete,
            std::function<void(const Answer&)> then);
  void Answered(const HomeQuestion& question, const Answer& answer);
  void AnsweredTrail(const TrailQuestion& question, const Answer& answer);
  void NoteAnswer(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                  const Answer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Goes on with trails, then fetches what is known of `runs`.
  void Proceed(const std::vector<size_t>& runs, std::vector<ReferralTrail> trails);
  // A trail has come to its end; the home hears of what holders lacked.
  void EndTrail(const ReferralTrail& trail);
  // Takes what can be fetched now out of `runs`.
  std::vector<PageFetch> TakeFetches(const std::vector<size_t>& runs,
                                     std::vector<std::shared_ptr<Lease>>* leases)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Settle(size_t page, storage::MissReason reason);
  void SettleLocked(size_t page, storage::MissReason reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Expire();
  // Ends the wait when the end of the prefix is known.
  void FinishIfKnown();
  void Land();

  const PullContext& context_;
  const PullRequest request_;

  Mutex mutex_;
  Done done_ ABSL_GUARDED_BY(mutex_);
  std::vector<Run> runs_ ABSL_GUARDED_BY(mutex_);
  std::vector<PageState> states_ ABSL_GUARDED_BY(mutex_);
  std::vector<storage::MissReason> reasons_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> own_ ABSL_GUARDED_BY(mutex_);
  std::vector<size_t> to_land_ ABSL_GUARDED_BY(mutex_);  // settled, not told to others yet
  std::optional<storage::DeadlineTimer::Id> timer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
