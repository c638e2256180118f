// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "server/cluster/home_requests.h"
#include "server/cluster/referral_trail.h"

namespace crumb::server {

// The calls that find pages which this node lacks: it sends one PeerAcquire to each home of the
// runs, all at once, and follows the referrals in their responses (referral_trail.h).
//
//   Inquire -> SendToHome (each home)  -> TakeHomeResponse  -+
//           -> Follow (own referrals)                        +-> Follow -> SendTrail, or EndTrail
//              SendTrail (each holder) -> TakeTrailResponse -+          -> Progress
//
// A derived class completes the requests and uses the responses. The object lives as long as a
// callback refers to it. Thread-safe.
class HomeInquiry : public std::enable_shared_from_this<HomeInquiry> {
 public:
  virtual ~HomeInquiry() = default;

 protected:
  // Pages of one run that this node lacks.
  struct RequestedRun {
    PageKey key;
    std::vector<size_t> pages;  // indices into request_.keys
    size_t outstanding = 0;     // homes without a response yet, and referrals that are followed
    MissReason reason = MissReason::kAbsent;  // why the first page without a hit is missing
  };

  // `steps`: the executor that handles responses; null: they are handled on the thread that brings
  // them.
  HomeInquiry(const PullContext& context, PullRequest request, Executor* steps);

  // Sends the requests for all of runs_. `counted`: the pages are to be read where they are found.
  void Inquire(bool counted);

  // Completes a request before it is sent.
  virtual void Prepare(v1::PeerAcquireRequest* request) const = 0;
  // Takes the pages that `peer` has of `runs`; the response fits the request.
  virtual void NoteHits(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                        const v1::PeerAcquireResponse& response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Returns whether referrals for the run are still of use.
  virtual bool Wants(size_t run) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Called after each response, without the lock: the state of `runs` may have changed.
  virtual void Progress(const std::vector<size_t>& runs) = 0;

  const PullContext& context_;
  const PullRequest request_;
  mutable Mutex mutex_;
  std::vector<RequestedRun> runs_ ABSL_GUARDED_BY(mutex_);

 private:
  using Response = absl::StatusOr<v1::PeerAcquireResponse>;

  // Sends a home the request for its runs.
  void SendToHome(const HomeRequest& home);
  // Sends a holder, or the home again, the request for the runs of its trails.
  void SendTrail(const TrailRequest& trail_request);
  // Sends a request, counts the call for metrics and the peer's breaker, and reports newer
  // generations. A response that does not fit becomes kInternal. `then` is called once, with this
  // object alive.
  void Send(const std::shared_ptr<Peer>& peer, const v1::PeerAcquireRequest& request,
            std::function<void(const Response&)> then);
  // Notes a home's hits and follows its referrals.
  void TakeHomeResponse(const HomeRequest& home, const Response& response);
  // Notes a holder's hits. Ends trails that are satisfied and follows the others to their next
  // node.
  void TakeTrailResponse(const TrailRequest& trail_request, const Response& response);
  // Passes hits to NoteHits and stores why pages of `runs` are missing.
  void NoteResponse(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                    const Response& response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends the next request of each trail, ends trails that have no next node or are no longer
  // wanted, then calls Progress for `runs` and the runs of ended trails.
  void Follow(std::vector<size_t> runs, std::vector<ReferralTrail> trails);
  // Ends a trail and reports to the home which holders lacked pages.
  void EndTrail(const ReferralTrail& trail);
  // Returns the request for the keys of `runs`, completed by Prepare.
  v1::PeerAcquireRequest RequestFor(const std::vector<size_t>& runs) const;

  Executor* const steps_;
};

}  // namespace crumb::server
