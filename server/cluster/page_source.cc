// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/page_source.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "common/mutex.h"

namespace crumb::server {
namespace {

using transport::PageStatus;

PageStatus StatusOf(MissReason reason) {
  switch (reason) {
    case MissReason::kNotCovered:
      return PageStatus::kNotCovered;
    case MissReason::kGeneration:
      return PageStatus::kStale;
    case MissReason::kBusy:
      return PageStatus::kBusy;
    case MissReason::kDeadline:
      return PageStatus::kDeadline;
    case MissReason::kNone:
    case MissReason::kAbsent:
    case MissReason::kPending:
    case MissReason::kCorrupt:
    case MissReason::kQuality:      // a store knows no such state
    case MissReason::kUnavailable:  // a client alone reports it
      return PageStatus::kAbsent;
  }
  return PageStatus::kAbsent;
}

// Store leases that end with the last send.
struct HeldLeases {
  explicit HeldLeases(storage::TieredStore& owner) : store(owner) {}
  HeldLeases(const HeldLeases&) = delete;
  HeldLeases& operator=(const HeldLeases&) = delete;
  ~HeldLeases() {
    for (const storage::LeaseId lease : leases) store.Release(lease);
  }
  storage::TieredStore& store;
  std::vector<storage::LeaseId> leases;
  std::shared_ptr<const PartyBudget::Hold> budget;  // the request's place
};

// One request: leases stretch after stretch, since the store leases prefixes and a page that is
// absent ends one. Behind a page that is absent a stretch has one page, and each that is complete
// is followed by one of twice the length: so the keys of all stretches together are at most about
// three times the request's, wherever pages are absent.
class Walk : public std::enable_shared_from_this<Walk> {
 public:
  Walk(storage::TieredStore& store, transport::SourceRequest request,
       transport::FragmentSource::Reply reply, ClusterMetrics& metrics,
       std::shared_ptr<const PartyBudget::Hold> budget)
      : store_(store),
        request_(std::move(request)),
        reply_(std::move(reply)),
        metrics_(metrics),
        held_(std::make_shared<HeldLeases>(store)) {
    held_->budget = std::move(budget);
    response_.pages.resize(request_.pages.size());
  }

  // Goes on until the store does not call back at once, or all pages are done.
  void Go() {
    while (next_ < request_.pages.size()) {
      {
        MutexLock lock(&mutex_);
        responded_ = false;
        left_ = false;
      }
      store_.Acquire(Stretch(),
                     [self = shared_from_this()](absl::StatusOr<storage::AcquireResult> result) {
                       self->Take(std::move(result));
                       bool resume = false;
                       {
                         MutexLock lock(&self->mutex_);
                         self->responded_ = true;
                         resume = self->left_;
                       }
                       if (resume) self->Go();
                     });
      MutexLock lock(&mutex_);
      if (!responded_) {
        left_ = true;
        return;
      }
    }
    response_.lease = std::move(held_);
    reply_(std::move(response_));
  }

 private:
  storage::AcquireRequest Stretch() const {
    storage::AcquireRequest wanted;
    wanted.keyspace = request_.keyspace;
    wanted.generation = request_.generation;
    wanted.range = request_.pages[next_].range;
    wanted.deadline = request_.deadline;
    for (size_t i = next_; i < request_.pages.size() && wanted.keys.size() < stretch_max_; ++i) {
      if (request_.pages[i].range != wanted.range) break;
      wanted.keys.push_back(request_.pages[i].key);
    }
    return wanted;
  }

  void Take(absl::StatusOr<storage::AcquireResult> result) {
    if (!result.ok()) {
      for (; next_ < request_.pages.size(); ++next_) {
        response_.pages[next_].status = PageStatus::kUnavailable;
      }
      return;
    }
    if (result->lease != 0) held_->leases.push_back(result->lease);
    for (const storage::FragmentRef& fragment : result->fragments) {
      const auto bytes = store_.Bytes(fragment);
      const FragmentShape shape = ShapeOfHeader(bytes.subspan(fragment.tiles_bytes));
      transport::SourcePage& page = response_.pages[next_ + fragment.page];
      page.status = PageStatus::kHit;
      page.fragments.push_back({bytes, shape.range, shape.tile_bytes});
    }
    metrics_.served_pages.Add(result->hit_pages);
    next_ += result->hit_pages;
    if (result->miss_reason != MissReason::kNone) {
      stretch_max_ = 1;
    } else if (stretch_max_ <= request_.pages.size()) {
      stretch_max_ *= 2;
    }
    if (next_ < request_.pages.size() && result->miss_reason != MissReason::kNone) {
      response_.pages[next_++].status = StatusOf(result->miss_reason);
    }
  }

  storage::TieredStore& store_;
  const transport::SourceRequest request_;
  const transport::FragmentSource::Reply reply_;
  ClusterMetrics& metrics_;
  // Only one thread at a time goes on.
  std::shared_ptr<HeldLeases> held_;
  transport::SourceResponse response_;
  size_t next_ = 0;
  size_t stretch_max_ = SIZE_MAX;

  Mutex mutex_;
  bool responded_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

void PageSource::Acquire(transport::SourceRequest request, Reply reply) {
  const auto refuse = [&](PageStatus status) {
    transport::SourceResponse response;
    response.pages.resize(request.pages.size());
    for (transport::SourcePage& page : response.pages) page.status = status;
    reply(std::move(response));
  };
  const auto keyspace = keyspaces_.Find(request.keyspace);
  const std::optional<std::string> node = sessions_.ReaderOf(request.session, request.keyspace);
  absl::flat_hash_set<PageKey> keys;
  // A request that names a page twice would have its bytes sent twice.
  const bool distinct = std::all_of(request.pages.begin(), request.pages.end(),
                                    [&](const auto& page) { return keys.insert(page.key).second; });
  if (keyspace == nullptr || !node || !distinct) {
    metrics_.serve_refused.Add();
    return refuse(PageStatus::kRefused);
  }
  if (keyspace->generation.load() > request.generation) return refuse(PageStatus::kStale);
  if (keyspace->unsynced()) return refuse(PageStatus::kStale);
  if (keyspace->quality_off()) return refuse(PageStatus::kAbsent);
  std::shared_ptr<const PartyBudget::Hold> budget = reads_.Take(*node, 1);
  if (budget == nullptr) {
    metrics_.peer_reads_refused.Add();
    return refuse(PageStatus::kBusy);
  }
  std::make_shared<Walk>(store_, std::move(request), std::move(reply), metrics_, std::move(budget))
      ->Go();
}

}  // namespace crumb::server
