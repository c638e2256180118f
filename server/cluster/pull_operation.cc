// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/pull_operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/cluster/page_fetch.h"

namespace crumb::server {

struct PullOperation::Lease {
  Lease(std::shared_ptr<Peer> from, uint64_t number) : peer(std::move(from)), id(number) {}
  ~Lease() {
    if (id != 0) peer->Release(id);
  }
  const std::shared_ptr<Peer> peer;
  const uint64_t id;
};

PullOperation::PullOperation(const PullContext& context, PullRequest request, Done done)
    : HomeInquiry(context, std::move(request), &context.steps),
      done_(std::move(done)),
      states_(request_.keys.size(), PageState::kOpen),
      reasons_(request_.keys.size(), MissReason::kNone),
      own_(request_.keys.size(), false) {}

void PullOperation::Start() {
  ClaimPages();
  {
    MutexLock lock(&mutex_);
    timer_ =
        context_.timer.Schedule(request_.deadline, [this, self = shared_from_this()] { Expire(); });
  }
  Inquire(/*counted=*/true);
}

void PullOperation::ClaimPages() {
  const std::vector<RunSpan> spans = RunsOf(request_);
  const std::vector<std::optional<Tier>> here = TiersHere(context_.store, request_);
  std::vector<bool> placed(here.size(), false);
  for (const RunSpan& span : spans) {
    RequestedRun run;
    run.key = span.key;
    for (size_t page = span.begin; page < span.end; ++page) {
      if (here[page]) continue;
      placed[page] = true;
      const bool mine =
          context_.flights.Claim(request_.keyspace->id, request_.keys[page], request_.range,
                                 [this, self = shared_from_this(), page](bool arrived) {
                                   Settle(page, arrived ? MissReason::kNone : MissReason::kAbsent);
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
  sources_.resize(runs_.size());
  for (size_t page = 0; page < placed.size(); ++page) {
    if (here[page]) {
      SettleLocked(page, MissReason::kNone);
    } else if (!placed[page]) {
      SettleLocked(page, MissReason::kAbsent);
    }
  }
}

void PullOperation::Prepare(v1::PeerAcquireRequest* message) const {
  message->set_lease(true);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(request_.deadline -
                                                                          context_.clock.Now());
  // Half of the time is left for the bytes.
  message->set_wait_ms(static_cast<uint32_t>(std::max<int64_t>(left.count() / 2, 0)));
}

void PullOperation::Progress(const std::vector<size_t>& runs) {
  std::vector<PageFetch> fetches;
  std::vector<std::shared_ptr<Lease>> leases;
  {
    MutexLock lock(&mutex_);
    fetches = TakeFetches(runs, &leases);
  }
  for (size_t i = 0; i < fetches.size(); ++i) {
    StartPageFetch(context_, fetches[i], leases[i],
                   [this, self = shared_from_this()](size_t page, MissReason reason) {
                     Settle(page, reason);
                   });
  }
  Land();
  FinishIfKnown();
}

void PullOperation::NoteHits(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                             const v1::PeerAcquireResponse& response) {
  const auto lease = std::make_shared<Lease>(peer, response.lease());
  transport::SessionToken session{};
  if (response.session().size() == session.size()) {
    std::memcpy(session.data(), response.session().data(), session.size());
  }
  int next = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    Source& source = sources_[runs[i]];
    const auto hits = static_cast<int>(response.hit_pages(static_cast<int>(i)));
    if (!source.fetching && static_cast<size_t>(hits) > source.tile_bytes.size()) {
      source.from = peer;
      source.lease = lease;
      source.session = session;
      source.tile_bytes.assign(response.tile_bytes().begin() + next,
                               response.tile_bytes().begin() + next + hits);
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
    const RequestedRun& run = runs_[index];
    Source& source = sources_[index];
    const bool complete = source.tile_bytes.size() == run.pages.size();
    if (source.fetching || (!complete && run.outstanding > 0)) continue;
    source.fetching = true;
    const bool in_vain = !run.pages.empty() && run.pages.front() > first_missing;
    const size_t hits = in_vain ? 0 : source.tile_bytes.size();
    for (size_t i = hits; i < run.pages.size(); ++i) SettleLocked(run.pages[i], run.reason);
    if (hits > 0) {
      auto fetch = std::find_if(fetches.begin(), fetches.end(),
                                [&](const PageFetch& other) { return other.from == source.from; });
      if (fetch == fetches.end()) {
        PageFetch fresh;
        fresh.from = source.from;
        fresh.keyspace = request_.keyspace;
        fresh.range = request_.range;
        fresh.session = source.session;
        fresh.deadline = request_.deadline;
        fetches.push_back(std::move(fresh));
        leases->push_back(source.lease);
        fetch = std::prev(fetches.end());
      }
      for (size_t i = 0; i < hits; ++i) {
        fetch->keys.push_back(request_.keys[run.pages[i]]);
        fetch->tile_bytes.push_back(source.tile_bytes[i]);
        fetch->names.push_back(run.pages[i]);
        fetch->runs.push_back(request_.everyone ? PageKey() : run.key);
      }
    }
    source.lease.reset();
    source.from.reset();
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

// Notifies requests that wait for the same pages; outside the lock, since they lock themselves.
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
