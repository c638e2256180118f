// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/pull_operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/cluster/page_fetch.h"

namespace crumb::server {
namespace {

using storage::MissReason;

}  // namespace

struct PullOperation::Lease {
  Lease(std::shared_ptr<Peer> from, uint64_t number) : peer(std::move(from)), id(number) {}
  ~Lease() {
    if (id != 0) peer->Release(id);
  }
  const std::shared_ptr<Peer> peer;
  const uint64_t id;
};

PullOperation::PullOperation(const PullContext& context, PullRequest request, Done done)
    : context_(context),
      request_(std::move(request)),
      done_(std::move(done)),
      states_(request_.keys.size(), PageState::kOpen),
      reasons_(request_.keys.size(), MissReason::kNone),
      own_(request_.keys.size(), false) {}

void PullOperation::Start() {
  ClaimPages();
  {
    MutexLock lock(&mutex_);
    timer_ =
        context_.timer.Schedule(request_.deadline, [self = shared_from_this()] { self->Expire(); });
  }
  std::vector<ReferralTrail> own;
  for (const HomeQuestion& question : MakeQuestions(&own)) Ask(question);
  Proceed({}, std::move(own));
}

void PullOperation::ClaimPages() {
  const std::vector<RunSpan> spans = RunsOf(request_);
  const std::vector<std::optional<storage::Tier>> here = TiersHere(context_.store, request_);
  std::vector<bool> placed(here.size(), false);
  for (const RunSpan& span : spans) {
    Run run;
    run.key = span.key;
    for (size_t page = span.begin; page < span.end; ++page) {
      if (here[page]) continue;
      placed[page] = true;
      const bool mine = context_.flights.Claim(
          request_.keyspace->id, request_.keys[page], request_.range,
          [self = shared_from_this(), page](bool arrived) {
            self->Settle(page, arrived ? MissReason::kNone : MissReason::kAbsent);
          });
      if (mine) {
        run.pages.push_back(page);
      } else {
        context_.metrics.pull_coalesced_pages.Add();
      }
    }
    MutexLock lock(&mutex_);
    for (const size_t page : run.pages) own_[page] = true;
    if (!run.pages.empty()) runs_.push_back(std::move(run));
  }
  MutexLock lock(&mutex_);
  for (size_t page = 0; page < placed.size(); ++page) {
    if (here[page]) {
      SettleLocked(page, MissReason::kNone);
    } else if (!placed[page]) {
      SettleLocked(page, MissReason::kAbsent);
    }
  }
}

std::vector<HomeQuestion> PullOperation::MakeQuestions(std::vector<ReferralTrail>* own) {
  std::vector<PageKey> names;
  std::vector<std::vector<size_t>> pages;
  {
    MutexLock lock(&mutex_);
    for (const Run& run : runs_) {
      names.push_back(run.key);
      pages.push_back(run.pages);
    }
  }
  for (size_t run = 0; run < names.size(); ++run) {
    auto referral = OwnReferral(context_, request_, names[run], pages[run], /*counted=*/true);
    if (referral) own->push_back({run, nullptr, referral->pages, std::move(referral->nodes), {}});
  }
  std::vector<HomeQuestion> questions = QuestionsFor(context_, names, request_.everyone);
  MutexLock lock(&mutex_);
  for (const HomeQuestion& question : questions) {
    for (const size_t run : question.runs) ++runs_[run].unanswered;
  }
  for (const ReferralTrail& trail : *own) ++runs_[trail.run].unanswered;
  for (const Run& run : runs_) {
    if (run.unanswered > 0) continue;
    for (const size_t page : run.pages) SettleLocked(page, MissReason::kAbsent);
  }
  return questions;
}

void PullOperation::Send(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                         const std::function<void(v1::PeerAcquireRequest&)>& complete,
                         std::function<void(const Answer&)> then) {
  std::vector<std::string> keys;
  {
    MutexLock lock(&mutex_);
    for (const size_t run : runs) keys.push_back(KeyBytes(request_.keys, runs_[run].pages));
  }
  v1::PeerAcquireRequest wanted = MakePeerAcquire(request_, std::move(keys));
  wanted.set_lease(true);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(request_.deadline -
                                                                          context_.clock.Now());
  // Half of the time is left for the bytes.
  wanted.set_wait_ms(static_cast<uint32_t>(std::max<int64_t>(left.count() / 2, 0)));
  complete(wanted);
  context_.metrics.pull_asks.Add();
  peer->Acquire(wanted, request_.deadline,
                [self = shared_from_this(), peer, wanted, then = std::move(then)](Answer answer) {
                  if (answer.ok() && !Fits(wanted, *answer)) {
                    answer = absl::InternalError("the answer does not fit the question");
                  }
                  auto shared = std::make_shared<Answer>(std::move(answer));
                  const auto take = [self, peer, then](const Answer& taken) {
                    peer->breaker().Note(taken.status());
                    if (!taken.ok()) {
                      self->context_.metrics.pull_ask_failures.Add();
                    } else if (taken->generation() > self->request_.keyspace->generation.load()) {
                      self->context_.heard_of_newer(peer->id());
                    }
                    then(taken);
                  };
                  const bool queued =
                      self->context_.steps.Submit([take, shared] { take(*shared); });
                  if (!queued) take(absl::ResourceExhaustedError("cluster.pull_queue"));
                });
}

void PullOperation::Ask(const HomeQuestion& question) {
  Send(
      question.peer, question.runs,
      [this](v1::PeerAcquireRequest& wanted) { wanted.set_refer(!request_.everyone); },
      [self = shared_from_this(), question](const Answer& answer) {
        self->Answered(question, answer);
      });
}

void PullOperation::AskTrail(const TrailQuestion& question) {
  std::vector<size_t> runs;
  for (const ReferralTrail& trail : question.trails) runs.push_back(trail.run);
  Send(
      question.peer, runs,
      [&question](v1::PeerAcquireRequest& wanted) {
        if (question.to != TrailQuestion::To::kHome) return;
        for (size_t i = 0; i < question.trails.size(); ++i) {
          AddShortfalls(question.trails[i], i, wanted);
        }
      },
      [self = shared_from_this(), question](const Answer& answer) {
        self->AnsweredTrail(question, answer);
      });
}

void PullOperation::Answered(const HomeQuestion& question, const Answer& answer) {
  std::vector<ReferralTrail> trails;
  {
    MutexLock lock(&mutex_);
    NoteAnswer(question.peer, question.runs, answer);
    if (answer.ok() && !request_.everyone) {
      std::vector<size_t> pages;
      for (const size_t run : question.runs) pages.push_back(runs_[run].pages.size());
      trails = TrailsOf(question, *answer, pages);
    }
    for (const size_t run : question.runs) --runs_[run].unanswered;
    for (const ReferralTrail& trail : trails) ++runs_[trail.run].unanswered;
  }
  context_.metrics.referred_runs.Add(trails.size());
  Proceed(question.runs, std::move(trails));
}

void PullOperation::AnsweredTrail(const TrailQuestion& question, const Answer& answer) {
  std::vector<size_t> runs;
  for (const ReferralTrail& trail : question.trails) runs.push_back(trail.run);
  std::vector<ReferralTrail> trails;
  std::vector<ReferralTrail> ended;
  {
    MutexLock lock(&mutex_);
    NoteAnswer(question.peer, runs, answer);
    for (size_t i = 0; i < runs.size(); ++i) {
      ReferralTrail trail = question.trails[i];
      const size_t hits = answer.ok() ? answer->hit_pages(static_cast<int>(i)) : 0;
      if (question.to == TrailQuestion::To::kHome) {
        --runs_[trail.run].unanswered;
      } else if (hits >= trail.pages) {
        ended.push_back(std::move(trail));
      } else {
        if (answer.ok()) trail.lacking.emplace_back(question.peer->id(), hits);
        trails.push_back(std::move(trail));
      }
    }
  }
  for (const ReferralTrail& trail : ended) EndTrail(trail);
  Proceed(runs, std::move(trails));
}

void PullOperation::EndTrail(const ReferralTrail& trail) {
  std::string keys;
  {
    MutexLock lock(&mutex_);
    --runs_[trail.run].unanswered;
    keys = KeyBytes(request_.keys, runs_[trail.run].pages);
  }
  ReportShortfalls(context_, request_, trail, keys);
}

void PullOperation::Proceed(const std::vector<size_t>& runs, std::vector<ReferralTrail> trails) {
  std::vector<ReferralTrail> ended;
  std::vector<size_t> settled = runs;
  {
    // Runs that another node has all of by now, and those of a request that is over.
    MutexLock lock(&mutex_);
    std::erase_if(trails, [&](ReferralTrail& trail) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      if (done_ && !runs_[trail.run].fetching) return false;
      ended.push_back(std::move(trail));
      return true;
    });
  }
  const std::vector<TrailQuestion> questions = NextQuestions(context_, std::move(trails), &ended);
  for (const ReferralTrail& trail : ended) {
    EndTrail(trail);
    settled.push_back(trail.run);
  }
  std::vector<PageFetch> fetches;
  std::vector<std::shared_ptr<Lease>> leases;
  {
    MutexLock lock(&mutex_);
    fetches = TakeFetches(settled, &leases);
  }
  for (size_t i = 0; i < fetches.size(); ++i) {
    StartPageFetch(context_, fetches[i], leases[i],
                   [self = shared_from_this()](size_t page, MissReason reason) {
                     self->Settle(page, reason);
                   });
  }
  for (const TrailQuestion& question : questions) AskTrail(question);
  Land();
  FinishIfKnown();
}

void PullOperation::NoteAnswer(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                               const Answer& answer) {
  if (!answer.ok()) {
    if (!absl::IsDeadlineExceeded(answer.status())) return;
    for (const size_t run : runs) runs_[run].reason = MissReason::kDeadline;
    return;
  }
  const auto lease = std::make_shared<Lease>(peer, answer->lease());
  transport::SessionToken session{};
  if (answer->session().size() == session.size()) {
    std::memcpy(session.data(), answer->session().data(), session.size());
  }
  int next = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    Run& run = runs_[runs[i]];
    const auto hits = static_cast<int>(answer->hit_pages(static_cast<int>(i)));
    if (!run.fetching && static_cast<size_t>(hits) > run.tile_bytes.size()) {
      run.from = peer;
      run.lease = lease;
      run.session = session;
      run.tile_bytes.assign(answer->tile_bytes().begin() + next,
                            answer->tile_bytes().begin() + next + hits);
    }
    if (answer->miss_reason() != v1::MISS_REASON_UNSPECIFIED) {
      run.reason = ReasonFromProto(answer->miss_reason());
    }
    next += hits;
  }
}

std::vector<PageFetch> PullOperation::TakeFetches(const std::vector<size_t>& runs,
                                                  std::vector<std::shared_ptr<Lease>>* leases) {
  std::vector<PageFetch> fetches;
  const auto first_missing = static_cast<size_t>(
      std::find(states_.begin(), states_.end(), PageState::kMissing) - states_.begin());
  for (const size_t index : runs) {
    Run& run = runs_[index];
    const bool complete = run.tile_bytes.size() == run.pages.size();
    if (run.fetching || (!complete && run.unanswered > 0)) continue;
    run.fetching = true;
    const bool in_vain = !run.pages.empty() && run.pages.front() > first_missing;
    const size_t hits = in_vain ? 0 : run.tile_bytes.size();
    for (size_t i = hits; i < run.pages.size(); ++i) SettleLocked(run.pages[i], run.reason);
    if (hits > 0) {
      auto fetch = std::find_if(fetches.begin(), fetches.end(),
                                [&](const PageFetch& other) { return other.from == run.from; });
      if (fetch == fetches.end()) {
        PageFetch fresh;
        fresh.from = run.from;
        fresh.keyspace = request_.keyspace;
        fresh.range = request_.range;
        fresh.session = run.session;
        fresh.deadline = request_.deadline;
        fetches.push_back(std::move(fresh));
        leases->push_back(run.lease);
        fetch = std::prev(fetches.end());
      }
      for (size_t i = 0; i < hits; ++i) {
        fetch->keys.push_back(request_.keys[run.pages[i]]);
        fetch->tile_bytes.push_back(run.tile_bytes[i]);
        fetch->names.push_back(run.pages[i]);
        fetch->runs.push_back(request_.everyone ? PageKey() : run.key);
      }
    }
    run.lease.reset();
    run.from.reset();
  }
  return fetches;
}

void PullOperation::Settle(size_t page, MissReason reason) {
  {
    MutexLock lock(&mutex_);
    SettleLocked(page, reason);
  }
  Land();
  FinishIfKnown();
}

void PullOperation::SettleLocked(size_t page, MissReason reason) {
  if (states_[page] != PageState::kOpen) return;
  states_[page] = reason == MissReason::kNone ? PageState::kHere : PageState::kMissing;
  reasons_[page] = reason;
  if (own_[page]) to_land_.push_back(page);
}

// Tells requests that wait for the same pages; outside the lock, since they lock themselves.
void PullOperation::Land() {
  std::vector<std::pair<size_t, bool>> landed;
  {
    MutexLock lock(&mutex_);
    for (const size_t page : to_land_) landed.emplace_back(page, states_[page] == PageState::kHere);
    to_land_.clear();
  }
  for (const auto& [page, arrived] : landed) {
    context_.flights.Land(request_.keyspace->id, request_.keys[page], request_.range, arrived);
  }
}

// Pages that are still open are too late for this request. Fetches under way end by the same
// deadline and settle their pages, for others and for next time.
void PullOperation::Expire() {
  Done done;
  PullResult result;
  {
    MutexLock lock(&mutex_);
    if (!done_) return;
    done = std::exchange(done_, nullptr);
    while (result.pages < states_.size() && states_[result.pages] == PageState::kHere) {
      ++result.pages;
    }
    if (result.pages < states_.size()) {
      const bool open = states_[result.pages] == PageState::kOpen;
      result.miss_reason = open ? MissReason::kDeadline : reasons_[result.pages];
    }
  }
  context_.metrics.pulls_late.Add();
  done(result);
}

void PullOperation::FinishIfKnown() {
  Done done;
  PullResult result;
  {
    MutexLock lock(&mutex_);
    if (!done_) return;
    while (result.pages < states_.size() && states_[result.pages] == PageState::kHere) {
      ++result.pages;
    }
    if (result.pages < states_.size()) {
      if (states_[result.pages] == PageState::kOpen) return;
      result.miss_reason = reasons_[result.pages];
    }
    done = std::exchange(done_, nullptr);
    if (timer_) context_.timer.Cancel(*timer_);
  }
  done(result);
}

}  // namespace crumb::server
