// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/home_inquiry.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace crumb::server {

HomeInquiry::HomeInquiry(const PullContext& context, PullRequest request, Executor* steps)
    : context_(context), request_(std::move(request)), steps_(steps) {}

void HomeInquiry::Inquire(bool counted) {
  std::vector<PageKey> names;
  std::vector<std::vector<size_t>> pages;
  {
    MutexLock lock(&mutex_);
    for (const RequestedRun& run : runs_) {
      names.push_back(run.key);
      pages.push_back(run.pages);
    }
  }
  std::vector<ReferralTrail> own;  // runs that this node is a home of itself
  for (size_t run = 0; run < names.size(); ++run) {
    auto referral = OwnReferral(context_, request_, names[run], pages[run], counted);
    if (referral) own.push_back({run, nullptr, referral->pages, std::move(referral->nodes), {}});
  }
  const std::vector<HomeRequest> requests = HomeRequestsFor(context_, names, request_.everyone);
  {
    MutexLock lock(&mutex_);
    for (const HomeRequest& request : requests) {
      for (const size_t run : request.runs) ++runs_[run].outstanding;
    }
    for (const ReferralTrail& trail : own) ++runs_[trail.run].outstanding;
  }
  for (const HomeRequest& request : requests) SendToHome(request);
  std::vector<size_t> all(names.size());
  std::iota(all.begin(), all.end(), 0);
  Follow(std::move(all), std::move(own));
}

v1::PeerAcquireRequest HomeInquiry::RequestFor(const std::vector<size_t>& runs) const {
  std::vector<std::string> keys;
  {
    MutexLock lock(&mutex_);
    for (const size_t run : runs) keys.push_back(KeyBytes(request_.keys, runs_[run].pages));
  }
  v1::PeerAcquireRequest request = MakePeerAcquire(request_, std::move(keys));
  Prepare(&request);
  return request;
}

void HomeInquiry::Send(const std::shared_ptr<Peer>& peer, const v1::PeerAcquireRequest& request,
                       std::function<void(const Response&)> then) {
  context_.metrics.pull_acquires.Add();
  const auto take = [self = shared_from_this(), peer,
                     then = std::move(then)](const Response& response) {
    peer->breaker().Note(response.status());
    if (!response.ok()) {
      self->context_.metrics.pull_acquire_failures.Add();
    } else if (response->generation() > self->request_.keyspace->generation.load()) {
      self->context_.newer_generation(peer->id());
    }
    then(response);
  };
  peer->Acquire(request, request_.deadline, [take, request, steps = steps_](Response response) {
    if (response.ok() && !Fits(request, *response)) {
      response = absl::InternalError("the response does not fit the request");
    }
    if (steps == nullptr) return take(response);
    const auto shared = std::make_shared<Response>(std::move(response));
    if (steps->Submit([take, shared] { take(*shared); })) return;
    take(absl::ResourceExhaustedError("cluster.pull_queue"));
  });
}

void HomeInquiry::SendToHome(const HomeRequest& home) {
  v1::PeerAcquireRequest wanted = RequestFor(home.runs);
  wanted.set_refer(!request_.everyone);
  Send(home.peer, wanted,
       [this, home](const Response& response) { TakeHomeResponse(home, response); });
}

void HomeInquiry::SendTrail(const TrailRequest& trail_request) {
  std::vector<size_t> runs;
  for (const ReferralTrail& trail : trail_request.trails) runs.push_back(trail.run);
  v1::PeerAcquireRequest wanted = RequestFor(runs);
  for (size_t i = 0; trail_request.to == TrailRequest::To::kHome && i < runs.size(); ++i) {
    AddShortfalls(trail_request.trails[i], i, &wanted);
  }
  Send(trail_request.peer, wanted, [this, trail_request](const Response& response) {
    TakeTrailResponse(trail_request, response);
  });
}

void HomeInquiry::TakeHomeResponse(const HomeRequest& home, const Response& response) {
  std::vector<ReferralTrail> trails;
  {
    MutexLock lock(&mutex_);
    NoteResponse(home.peer, home.runs, response);
    if (response.ok() && !request_.everyone) {
      std::vector<size_t> pages;
      for (const size_t run : home.runs) pages.push_back(runs_[run].pages.size());
      trails = TrailsOf(home, *response, pages);
    }
    for (const size_t run : home.runs) --runs_[run].outstanding;
    for (const ReferralTrail& trail : trails) ++runs_[trail.run].outstanding;
  }
  context_.metrics.referred_runs.Add(trails.size());
  Follow(home.runs, std::move(trails));
}

void HomeInquiry::TakeTrailResponse(const TrailRequest& trail_request, const Response& response) {
  std::vector<size_t> runs;
  for (const ReferralTrail& trail : trail_request.trails) runs.push_back(trail.run);
  std::vector<ReferralTrail> trails;
  std::vector<ReferralTrail> ended;
  {
    MutexLock lock(&mutex_);
    NoteResponse(trail_request.peer, runs, response);
    for (size_t i = 0; i < runs.size(); ++i) {
      ReferralTrail trail = trail_request.trails[i];
      const size_t hits = response.ok() ? response->hit_pages(static_cast<int>(i)) : 0;
      if (trail_request.to == TrailRequest::To::kHome) {
        --runs_[trail.run].outstanding;
      } else if (hits >= trail.pages) {
        ended.push_back(std::move(trail));
      } else {
        if (response.ok()) trail.lacking.emplace_back(trail_request.peer->id(), hits);
        trails.push_back(std::move(trail));
      }
    }
  }
  for (const ReferralTrail& trail : ended) EndTrail(trail);
  Follow(std::move(runs), std::move(trails));
}

void HomeInquiry::NoteResponse(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                               const Response& response) {
  if (response.ok()) NoteHits(peer, runs, *response);
  for (const size_t run : runs) {
    if (absl::IsDeadlineExceeded(response.status())) {
      runs_[run].reason = MissReason::kDeadline;
    } else if (response.ok() && response->miss_reason() != v1::MISS_REASON_UNSPECIFIED) {
      runs_[run].reason = ReasonFromProto(response->miss_reason());
    }
  }
}

void HomeInquiry::EndTrail(const ReferralTrail& trail) {
  std::string keys;
  {
    MutexLock lock(&mutex_);
    --runs_[trail.run].outstanding;
    keys = KeyBytes(request_.keys, runs_[trail.run].pages);
  }
  ReportShortfalls(context_, request_, trail, keys);
}

void HomeInquiry::Follow(std::vector<size_t> runs, std::vector<ReferralTrail> trails) {
  std::vector<ReferralTrail> ended;
  {
    MutexLock lock(&mutex_);
    std::erase_if(trails, [&](ReferralTrail& trail) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (Wants(trail.run)) return false;
      ended.push_back(std::move(trail));
      return true;
    });
  }
  const std::vector<TrailRequest> requests = NextRequests(context_, std::move(trails), &ended);
  for (const ReferralTrail& trail : ended) {
    EndTrail(trail);
    runs.push_back(trail.run);
  }
  for (const TrailRequest& request : requests) SendTrail(request);
  Progress(runs);
}

}  // namespace crumb::server
