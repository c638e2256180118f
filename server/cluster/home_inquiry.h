// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "server/cluster/home_questions.h"
#include "server/cluster/referral_trail.h"

namespace crumb::server {

// The calls that a request makes for pages that this node lacks: asks the homes of every run, one
// call a node and all at once, and follows their referrals (referral_trail.h). A derived class says
// what is asked for, and what becomes of the answers. Lives as long as a callback refers to it.
// Thread-safe.
class HomeInquiry : public std::enable_shared_from_this<HomeInquiry> {
 public:
  virtual ~HomeInquiry() = default;

 protected:
  // Pages of one run that this node lacks.
  struct AskedRun {
    PageKey key;
    std::vector<size_t> pages;  // indices into request_.keys
    size_t unanswered = 0;      // homes that were asked, or whose referrals are being followed
    MissReason reason = MissReason::kAbsent;  // of the first page that is no hit
  };

  // `steps`: runs what follows from answers; null: the thread that brings them.
  HomeInquiry(const PullContext& context, PullRequest request, Executor* steps);

  // Asks for all of runs_. `counted`: the pages are to be read where they are found.
  void Inquire(bool counted);

  // Completes a question.
  virtual void Prepare(v1::PeerAcquireRequest* question) const = 0;
  // Takes what `peer` has of `runs`; the answer fits the question.
  virtual void NoteHits(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                        const v1::PeerAcquireResponse& answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Whether referrals for the run are still of use.
  virtual bool Wants(size_t run) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // More is known of `runs`.
  virtual void Progress(const std::vector<size_t>& runs) = 0;

  const PullContext& context_;
  const PullRequest request_;
  mutable Mutex mutex_;
  std::vector<AskedRun> runs_ ABSL_GUARDED_BY(mutex_);

 private:
  using Answer = absl::StatusOr<v1::PeerAcquireResponse>;

  void Ask(const HomeQuestion& question);
  void AskTrail(const TrailQuestion& question);
  // `then` is called once, with this object alive.
  void Send(const std::shared_ptr<Peer>& peer, v1::PeerAcquireRequest question,
            std::function<void(const Answer&)> then);
  void Answered(const HomeQuestion& question, const Answer& answer);
  void AnsweredTrail(const TrailQuestion& question, const Answer& answer);
  void NoteAnswer(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                  const Answer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Goes on with trails; more is known of `runs`.
  void Follow(std::vector<size_t> runs, std::vector<ReferralTrail> trails);
  // A trail has come to its end; the home hears of what holders lacked.
  void EndTrail(const ReferralTrail& trail);
  v1::PeerAcquireRequest QuestionFor(const std::vector<size_t>& runs) const;

  Executor* const steps_;
};

}  // namespace crumb::server
