// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/find_operation.h"

#include <algorithm>
#include <map>
#include <utility>

namespace crumb::server {

FindOperation::FindOperation(const PullContext& context, PullRequest request, Done done)
    : HomeInquiry(context, std::move(request), nullptr),
      here_(TiersHere(context.store, request_)),
      done_(std::move(done)) {}

void FindOperation::FindRuns() {
  MutexLock lock(&mutex_);
  for (const RunSpan& span : RunsOf(request_)) {
    RequestedRun run;
    run.key = span.key;
    for (size_t page = span.begin; page < span.end; ++page) {
      if (!here_[page]) run.pages.push_back(page);
    }
    if (!run.pages.empty()) runs_.push_back(std::move(run));
  }
  found_.resize(runs_.size());
}

void FindOperation::Start() {
  FindRuns();
  {
    MutexLock lock(&mutex_);
    timer_ = context_.timer.Schedule(request_.deadline,
                                     [this, self = shared_from_this()] { Finish(true); });
  }
  Inquire(/*counted=*/false);
}

void FindOperation::NoteHits(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                             const v1::PeerAcquireResponse& response) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const size_t hits = response.hit_pages(static_cast<int>(i));
    if (hits > found_[runs[i]].hits) found_[runs[i]] = {hits, peer->id()};
  }
}

std::optional<FoundPages> FindOperation::Known(bool late) const {
  FoundPages found;
  std::map<std::string, uint32_t> numbers;
  size_t index = 0;  // the run that the page may belong to
  for (size_t page = 0; page < here_.size(); ++page) {
    if (here_[page]) {
      found.tiers.push_back(*here_[page]);
      continue;
    }
    while (index < runs_.size() && runs_[index].pages.back() < page) ++index;
    const bool requested = index < runs_.size() && runs_[index].pages.front() <= page;
    if (!requested) {
      found.miss_reason = MissReason::kAbsent;
      return found;
    }
    const RequestedRun& run = runs_[index];
    const Found& source = found_[index];
    const auto within = static_cast<size_t>(
        std::lower_bound(run.pages.begin(), run.pages.end(), page) - run.pages.begin());
    if (within >= source.hits) {
      if (run.outstanding > 0 && !late) return std::nullopt;
      found.miss_reason = run.outstanding > 0 ? MissReason::kDeadline : run.reason;
      return found;
    }
    const auto [number, is_new] =
        numbers.try_emplace(source.node, static_cast<uint32_t>(found.nodes.size()));
    if (is_new) found.nodes.push_back(source.node);
    found.tiers.push_back(Tier::kRemote);
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
