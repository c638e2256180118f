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

void FindOperation::Start() {
  std::vector<HomeQuestion> questions;
  {
    MutexLock lock(&mutex_);
    std::vector<PageKey> names;
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
    questions = QuestionsFor(context_, names, request_.everyone);
    for (const HomeQuestion& question : questions) {
      for (const size_t run : question.runs) ++runs_[run].unanswered;
    }
    timer_ = context_.timer.Schedule(request_.deadline,
                                     [self = shared_from_this()] { self->Finish(true); });
  }
  for (const HomeQuestion& question : questions) Ask(question);
  Finish(false);
}

void FindOperation::Ask(const HomeQuestion& question) {
  std::vector<std::string> runs;
  {
    MutexLock lock(&mutex_);
    for (const size_t run : question.runs) {
      runs.push_back(KeyBytes(request_.keys, runs_[run].pages));
    }
  }
  const v1::PeerAcquireRequest wanted = MakePeerAcquire(request_, std::move(runs));
  context_.metrics.pull_asks.Add();
  question.peer->Acquire(wanted, request_.deadline,
                         [self = shared_from_this(), question,
                          wanted](absl::StatusOr<v1::PeerAcquireResponse> answer) {
                           if (answer.ok() && !Fits(wanted, *answer)) {
                             answer = absl::InternalError("the answer does not fit the question");
                           }
                           self->Answered(question, answer);
                         });
}

void FindOperation::Answered(const HomeQuestion& question,
                             const absl::StatusOr<v1::PeerAcquireResponse>& answer) {
  question.peer->breaker().Note(answer.status());
  if (answer.ok()) {
    if (answer->generation() > request_.keyspace->generation.load()) {
      context_.heard_of_newer(question.peer->id());
    }
  } else {
    context_.metrics.pull_ask_failures.Add();
  }
  {
    MutexLock lock(&mutex_);
    if (answer.ok()) NoteAnswer(question, *answer);
    for (const size_t run : question.runs) {
      --runs_[run].unanswered;
      if (absl::IsDeadlineExceeded(answer.status())) runs_[run].reason = MissReason::kDeadline;
    }
  }
  Finish(false);
}

void FindOperation::NoteAnswer(const HomeQuestion& question,
                               const v1::PeerAcquireResponse& answer) {
  for (size_t i = 0; i < question.runs.size(); ++i) {
    Run& run = runs_[question.runs[i]];
    const size_t hits = answer.hit_pages(static_cast<int>(i));
    if (hits > run.hits) {
      run.hits = hits;
      run.node = question.peer->id();
    }
    if (answer.miss_reason() != v1::MISS_REASON_UNSPECIFIED) {
      run.reason = ReasonFromProto(answer.miss_reason());
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
