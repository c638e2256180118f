// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/remote_reader.h"

#include <utility>

#include "common/mutex.h"
#include "server/cluster/find_operation.h"
#include "server/cluster/page_fetch.h"
#include "server/cluster/pull_operation.h"

namespace crumb::server {

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
