// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/find_operation.h"

#include <algorithm>
#include <utility>

namespace crumb::server {

using storage::MissReason;

FindOperation::FindOperation(const PullContext& context, PullRequest request, Done done)
    : context_(context),
      request_(std::move(request)),
      here_(TiersHere(context.store, request_)),
      done_(std::move(done)) {}

std::vector<PageKey> FindOperation::FindRuns() {
  std::vector<PageKey> names;
  MutexLock lock(&mutex_);
  for (const RunSpan& span : RunsOf(request_)) {
    Run run;
    run.key = span.key;
    for (size_t page = span.begin; page < span.end; ++page) {
      if (!here_[page]) run.pages.push_back(page);
    }
    if (run.pages.empty()) continue;
    names.push_back(run.key);
    runs_.push_back(std::move(run));
  }
  return names;
}

void FindOperation::Start() {
  const std::vector<PageKey> names = FindRuns();
  std::vector<ReferralTrail> own;
  for (size_t run = 0; run < names.size(); ++run) {
    std::vector<size_t> pages;
    {
      MutexLock lock(&mutex_);
      pages = runs_[run].pages;
    }
    auto referral = OwnReferral(context_, request_, names[run], pages, /*counted=*/false);
    if (referral) own.push_back({run, nullptr, referral->pages, std::move(referral->nodes), {}});
  }
  const std::vector<HomeQuestion> questions = QuestionsFor(context_, names, request_.everyone);
  {
    MutexLock lock(&mutex_);
    for (const HomeQuestion& question : questions) {
      for (const size_t run : question.runs) ++runs_[run].unanswered;
    }
    for (const ReferralTrail& trail : own) ++runs_[trail.run].unanswered;
    timer_ = context_.timer.Schedule(request_.deadline,
                                     [self = shared_from_this()] { self->Finish(true); });
  }
  for (const HomeQuestion& question : questions) Ask(question);
  Proceed(std::move(own));
}

void FindOperation::Send(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                         const std::function<void(v1::PeerAcquireRequest&)>& complete,
                         std::function<void(const Answer&)> then) {
  std::vector<std::string> keys;
  {
    MutexLock lock(&mutex_);
    for (const size_t run : runs) keys.push_back(KeyBytes(request_.keys, runs_[run].pages));
  }
  v1::PeerAcquireRequest wanted = MakePeerAcquire(request_, std::move(keys));
  complete(wanted);
  context_.metrics.pull_asks.Add();
  peer->Acquire(wanted, request_.deadline,
                [self = shared_from_this(), peer, wanted, then = std::move(then)](Answer answer) {
                  if (answer.ok() && !Fits(wanted, *answer)) {
                    answer = absl::InternalError("the answer does not fit the question");
                  }
                  peer->breaker().Note(answer.status());
                  if (!answer.ok()) {
                    self->context_.metrics.pull_ask_failures.Add();
                  } else if (answer->generation() > self->request_.keyspace->generation.load()) {
                    self->context_.heard_of_newer(peer->id());
                  }
                  then(answer);
                });
}

void FindOperation::Ask(const HomeQuestion& question) {
  Send(
      question.peer, question.runs,
      [this](v1::PeerAcquireRequest& wanted) { wanted.set_refer(!request_.everyone); },
      [self = shared_from_this(), question](const Answer& answer) {
        self->Answered(question, answer);
      });
}

void FindOperation::AskTrail(const TrailQuestion& question) {
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

void FindOperation::Answered(const HomeQuestion& question, const Answer& answer) {
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
  Proceed(std::move(trails));
}

void FindOperation::AnsweredTrail(const TrailQuestion& question, const Answer& answer) {
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
  Proceed(std::move(trails));
}

void FindOperation::EndTrail(const ReferralTrail& trail) {
  std::string keys;
  {
    MutexLock lock(&mutex_);
    --runs_[trail.run].unanswered;
    keys = KeyBytes(request_.keys, runs_[trail.run].pages);
  }
  ReportShortfalls(context_, request_, trail, keys);
}

void FindOperation::Proceed(std::vector<ReferralTrail> trails) {
  std::vector<ReferralTrail> ended;
  {
    MutexLock lock(&mutex_);
    if (!done_) ended.swap(trails);
  }
  const std::vector<TrailQuestion> questions = NextQuestions(context_, std::move(trails), &ended);
  for (const ReferralTrail& trail : ended) EndTrail(trail);
  for (const TrailQuestion& question : questions) AskTrail(question);
  Finish(false);
}

void FindOperation::NoteAnswer(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                               const Answer& answer) {
  if (!answer.ok()) {
    if (!absl::IsDeadlineExceeded(answer.status())) return;
    for (const size_t run : runs) runs_[run].reason = MissReason::kDeadline;
    return;
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    Run& run = runs_[runs[i]];
    const size_t hits = answer->hit_pages(static_cast<int>(i));
    if (hits > run.hits) {
      run.hits = hits;
      run.node = peer->id();
    }
    if (answer->miss_reason() != v1::MISS_REASON_UNSPECIFIED) {
      run.reason = ReasonFromProto(answer->miss_reason());
    }
  }
}

std::optional<FoundPages> FindOperation::Known(bool late) const {
  FoundPages found;
  std::map<std::string, uint32_t> numbers;
  size_t index = 0;  // of the run that the page may belong to
  for (size_t page = 0; page < here_.size(); ++page) {
    if (here_[page]) {
      found.tiers.push_back(*here_[page]);
      continue;
    }
    while (index < runs_.size() && runs_[index].pages.back() < page) ++index;
    const bool asked = index < runs_.size() && runs_[index].pages.front() <= page;
    if (!asked) {
      found.miss_reason = MissReason::kAbsent;
      return found;
    }
    const Run& run = runs_[index];
    const auto within = static_cast<size_t>(
        std::lower_bound(run.pages.begin(), run.pages.end(), page) - run.pages.begin());
    if (within >= run.hits) {
      if (run.unanswered > 0 && !late) return std::nullopt;
      found.miss_reason = run.unanswered > 0 ? MissReason::kDeadline : run.reason;
      return found;
    }
    const auto [number, is_new] =
        numbers.try_emplace(run.node, static_cast<uint32_t>(found.nodes.size()));
    if (is_new) found.nodes.push_back(run.node);
    found.tiers.push_back(storage::Tier::kRemote);
    found.page_nodes.push_back(number->second);
  }
  return found;
}

void FindOperation::Finish(bool late) {
  Done done;
  std::optional<FoundPages> found;
  {
    MutexLock lock(&mutex_);
    if (!done_) return;
    found = Known(late);
    if (!found) return;
    done = std::exchange(done_, nullptr);
    if (timer_ && !late) context_.timer.Cancel(*timer_);
  }
  if (late) context_.metrics.pulls_late.Add();
  done(*std::move(found));
}

}  // namespace crumb::server
