// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/remote_reader.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "server/cluster/home_inquiry.h"
#include "server/cluster/page_fetch.h"
#include "server/cluster/pull_operation.h"

namespace crumb::server {

namespace {

// One RemoteReader::Find: finds the nodes that have the pages; ends when the prefix's end is known.
// Nothing is leased or moved. Thread-safe.
class FindOperation final : public HomeInquiry {
 public:
  using Done = std::function<void(FoundPages)>;

  FindOperation(const PullContext& context, PullRequest request, Done done);

  void Start();

 private:
  // The longest prefix of a run's pages that a node has reported.
  struct Found {
    size_t hits = 0;
    std::string node;
  };

  void FindRuns();
  void Prepare(v1::PeerAcquireRequest*) const override {}
  void NoteHits(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                const v1::PeerAcquireResponse& response) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Wants(size_t) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return done_ != nullptr;
  }
  void Progress(const std::vector<size_t>&) override { Finish(false); }
  // Ends the wait when the end of the prefix is known, or `late`.
  void Finish(bool late);
  // Returns the pages found so far; none: a node may still report the next page.
  std::optional<FoundPages> Known(bool late) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<std::optional<Tier>> here_;
  Done done_ ABSL_GUARDED_BY(mutex_);
  std::vector<Found> found_ ABSL_GUARDED_BY(mutex_);  // [runs_] the best result of each run
  std::optional<storage::DeadlineTimer::Id> timer_ ABSL_GUARDED_BY(mutex_);
};

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

}  // namespace

bool PageFlights::Claim(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range,
                        Landed landed) {
  MutexLock lock(&mutex_);
  const auto [flight, is_new] = waiting_.try_emplace(Name{keyspace, key, range});
  if (!is_new) flight->second.push_back(std::move(landed));
  return is_new;
}

void PageFlights::Land(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range,
                       bool arrived) {
  std::vector<Landed> waiting;
  {
    MutexLock lock(&mutex_);
    const auto found = waiting_.find(Name{keyspace, key, range});
    if (found == waiting_.end()) return;
    waiting = std::move(found->second);
    waiting_.erase(found);
  }
  for (const Landed& landed : waiting) landed(arrived);
}

std::shared_ptr<const PartyBudget::Hold> RemoteReader::Enter(const PullRequest& request) {
  const size_t most = request.awaited ? pulls_max_ : pulls_max_ / 2;
  if (active_.fetch_add(1) < most) {
    auto place = tenants_.Take(request.keyspace->tenant, 1);
    if (place != nullptr) return place;
  }
  active_.fetch_sub(1);
  context_.metrics.pulls_refused.Add();
  return nullptr;
}

void RemoteReader::Pull(PullRequest request, std::function<void(PullResult)> done) {
  auto place = Enter(request);
  if (place == nullptr) return done({0, MissReason::kBusy});
  context_.metrics.pulls.Add();
  std::make_shared<PullOperation>(context_, std::move(request),
                                  [this, place, done = std::move(done)](PullResult result) mutable {
                                    place.reset();
                                    active_.fetch_sub(1);
                                    done(result);
                                  })
      ->Start();
}

void RemoteReader::Find(PullRequest request, std::function<void(FoundPages)> done) {
  auto place = Enter(request);
  if (place == nullptr) {
    FoundPages none;
    none.miss_reason = MissReason::kBusy;
    return done(std::move(none));
  }
  context_.metrics.finds.Add();
  std::make_shared<FindOperation>(context_, std::move(request),
                                  [this, place, done = std::move(done)](FoundPages found) mutable {
                                    place.reset();
                                    active_.fetch_sub(1);
                                    done(std::move(found));
                                  })
      ->Start();
}

void RemoteReader::Take(OfferedPages offered, Taken done) {
  struct Progress {
    Mutex mutex;
    size_t open ABSL_GUARDED_BY(mutex) = 0;
    std::vector<MissReason> reasons ABSL_GUARDED_BY(mutex);
  };
  auto progress = std::make_shared<Progress>();
  PageFetch fetch;
  fetch.received = storage::Received::kHome;
  fetch.from = offered.from;
  fetch.keyspace = offered.keyspace;
  fetch.range = offered.range;
  fetch.session = offered.session;
  fetch.deadline = offered.deadline;
  fetch.keys = std::move(offered.keys);
  fetch.tile_bytes = std::move(offered.tile_bytes);
  for (size_t i = 0; i < fetch.keys.size(); ++i) fetch.names.push_back(i);
  {
    MutexLock lock(&progress->mutex);
    progress->open = fetch.keys.size();
    progress->reasons.assign(fetch.keys.size(), MissReason::kNone);
  }
  if (fetch.keys.empty()) return done({});
  StartPageFetch(context_, fetch, nullptr,
                 [progress, done = std::move(done)](size_t page, MissReason reason) {
                   std::vector<MissReason> reasons;
                   {
                     MutexLock lock(&progress->mutex);
                     progress->reasons[page] = reason;
                     if (--progress->open > 0) return;
                     reasons = progress->reasons;
                   }
                   done(reasons);
                 });
}

}  // namespace crumb::server
