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
    for (const AskedRun& run : runs_) {
      names.push_back(run.key);
      pages.push_back(run.pages);
    }
  }
  std::vector<ReferralTrail> own;  // of runs that this node is a home of itself
  for (size_t run = 0; run < names.size(); ++run) {
    auto referral = OwnReferral(context_, request_, names[run], pages[run], counted);
    if (referral) own.push_back({run, nullptr, referral->pages, std::move(referral->nodes), {}});
  }
  const std::vector<HomeQuestion> questions = QuestionsFor(context_, names, request_.everyone);
  {
    MutexLock lock(&mutex_);
    for (const HomeQuestion& question : questions) {
      for (const size_t run : question.runs) ++runs_[run].unanswered;
    }
    for (const ReferralTrail& trail : own) ++runs_[trail.run].unanswered;
  }
  for (const HomeQuestion& question : questions) Ask(question);
  std::vector<size_t> all(names.size());
  std::iota(all.begin(), all.end(), 0);
  Follow(std::move(all), std::move(own));
}

v1::PeerAcquireRequest HomeInquiry::QuestionFor(const std::vector<size_t>& runs) const {
  std::vector<std::string> keys;
  {
    MutexLock lock(&mutex_);
    for (const size_t run : runs) keys.push_back(KeyBytes(request_.keys, runs_[run].pages));
  }
  v1::PeerAcquireRequest question = MakePeerAcquire(request_, std::move(keys));
  Prepare(&question);
  return question;
}

void HomeInquiry::Send(const std::shared_ptr<Peer>& peer, v1::PeerAcquireRequest question,
                       std::function<void(const Answer&)> then) {
  context_.metrics.pull_asks.Add();
  const auto take = [self = shared_from_this(), peer,
                     then = std::move(then)](const Answer& answer) {
    peer->breaker().Note(answer.status());
    if (!answer.ok()) {
      self->context_.metrics.pull_ask_failures.Add();
    } else if (answer->generation() > self->request_.keyspace->generation.load()) {
      self->context_.heard_of_newer(peer->id());
    }
    then(answer);
  };
  peer->Acquire(question, request_.deadline, [take, question, steps = steps_](Answer answer) {
    if (answer.ok() && !Fits(question, *answer)) {
      answer = absl::InternalError("the answer does not fit the question");
    }
    if (steps == nullptr) return take(answer);
    const auto shared = std::make_shared<Answer>(std::move(answer));
    if (steps->Submit([take, shared] { take(*shared); })) return;
    take(absl::ResourceExhaustedError("cluster.pull_queue"));
  });
}

void HomeInquiry::Ask(const HomeQuestion& question) {
  v1::PeerAcquireRequest wanted = QuestionFor(question.runs);
  wanted.set_refer(!request_.everyone);
  Send(question.peer, std::move(wanted),
       [this, question](const Answer& answer) { Answered(question, answer); });
}

void HomeInquiry::AskTrail(const TrailQuestion& question) {
  std::vector<size_t> runs;
  for (const ReferralTrail& trail : question.trails) runs.push_back(trail.run);
  v1::PeerAcquireRequest wanted = QuestionFor(runs);
  for (size_t i = 0; question.to == TrailQuestion::To::kHome && i < runs.size(); ++i) {
    AddShortfalls(question.trails[i], i, wanted);
  }
  Send(question.peer, std::move(wanted),
       [this, question](const Answer& answer) { AnsweredTrail(question, answer); });
}

void HomeInquiry::Answered(const HomeQuestion& question, const Answer& answer) {
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
  Follow(question.runs, std::move(trails));
}

void HomeInquiry::AnsweredTrail(const TrailQuestion& question, const Answer& answer) {
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
  Follow(std::move(runs), std::move(trails));
}

void HomeInquiry::NoteAnswer(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                             const Answer& answer) {
  if (answer.ok()) NoteHits(peer, runs, *answer);
  for (const size_t run : runs) {
    if (absl::IsDeadlineExceeded(answer.status())) {
      runs_[run].reason = MissReason::kDeadline;
    } else if (answer.ok() && answer->miss_reason() != v1::MISS_REASON_UNSPECIFIED) {
      runs_[run].reason = ReasonFromProto(answer->miss_reason());
    }
  }
}

void HomeInquiry::EndTrail(const ReferralTrail& trail) {
  std::string keys;
  {
    MutexLock lock(&mutex_);
    --runs_[trail.run].unanswered;
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
  const std::vector<TrailQuestion> questions = NextQuestions(context_, std::move(trails), &ended);
  for (const ReferralTrail& trail : ended) {
    EndTrail(trail);
    runs.push_back(trail.run);
  }
  for (const TrailQuestion& question : questions) AskTrail(question);
  Progress(runs);
}

}  // namespace crumb::server
