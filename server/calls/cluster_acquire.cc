// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/cluster_acquire.h"

#include <algorithm>
#include <utility>

#include "common/placement.h"
#include "server/cluster/cluster.h"

namespace crumb::server {
namespace {

using Acquired = std::function<void(absl::StatusOr<storage::AcquireResult>)>;

// The page that begins the run of the page after the first `hits`.
PageKey RunOfRest(const ClusterAcquireRequest& request, size_t hits) {
  const size_t position = request.first_page + hits;
  const size_t begin = position - position % kRunPages;
  return begin >= request.first_page ? request.wanted.keys[begin - request.first_page]
                                     : request.run;
}

// Returns the request to the cluster when this node has the first `hits` pages.
PullRequest PullOfRest(const CallContext& context, const ClusterAcquireRequest& request,
                       size_t hits) {
  PullRequest pull;
  pull.keyspace = request.keyspace;
  pull.keys.assign(request.wanted.keys.begin() + static_cast<std::ptrdiff_t>(hits),
                   request.wanted.keys.end());
  pull.first_page = request.first_page + static_cast<uint32_t>(hits);
  pull.run = RunOfRest(request, hits);
  pull.range = request.wanted.range;
  pull.everyone = request.everyone;
  pull.awaited = request.awaited;
  pull.deadline = request.wanted.deadline;
  if (request.awaited) {
    pull.deadline =
        std::min(pull.deadline, context.clock.Now() + context.cluster->lookup_deadline());
  }
  return pull;
}

class AnywhereAcquire : public std::enable_shared_from_this<AnywhereAcquire> {
 public:
  AnywhereAcquire(const CallContext& context, ClusterAcquireRequest request, Acquired done)
      : context_(context), request_(std::move(request)), done_(std::move(done)) {}

  void Start() {
    context_.store.Acquire(request_.wanted, [self = shared_from_this()](
                                                absl::StatusOr<storage::AcquireResult> result) {
      self->Local(std::move(result));
    });
  }

 private:
  void Local(absl::StatusOr<storage::AcquireResult> result) {
    const TimePoint now = context_.clock.Now();
    const bool complete = !result.ok() || result->hit_pages == request_.wanted.keys.size();
    if (complete || !MayBeElsewhere(result->miss_reason) || request_.wanted.deadline <= now) {
      return done_(std::move(result));
    }
    local_ = *std::move(result);
    context_.cluster->Pull(
        PullOfRest(context_, request_, local_.hit_pages),
        [self = shared_from_this()](PullResult pulled) { self->Pulled(pulled); });
  }

  void Pulled(const PullResult& pulled) {
    if (pulled.pages == 0) {
      const bool says_more =
          pulled.miss_reason != MissReason::kNone && pulled.miss_reason != MissReason::kAbsent;
      if (says_more) local_.miss_reason = pulled.miss_reason;
      return done_(std::move(local_));
    }
    storage::AcquireRequest all = request_.wanted;
    all.keys.resize(local_.hit_pages + pulled.pages);
    context_.store.Acquire(std::move(all), [self = shared_from_this(),
                                            pulled](absl::StatusOr<storage::AcquireResult> result) {
      self->Joined(pulled, std::move(result));
    });
  }

  void Joined(const PullResult& pulled, absl::StatusOr<storage::AcquireResult> result) {
    if (!result.ok()) return done_(std::move(local_));
    if (local_.lease != 0) context_.store.Release(local_.lease);
    for (size_t page = 0; page < result->page_tiers.size(); ++page) {
      if (page < local_.hit_pages) {
        result->page_tiers[page] = local_.page_tiers[page];
      } else if (result->page_tiers[page] != Tier::kDevice) {
        result->page_tiers[page] = Tier::kRemote;
      }
    }
    const bool all_there = result->hit_pages == local_.hit_pages + pulled.pages;
    if (all_there) result->miss_reason = pulled.miss_reason;
    done_(std::move(result));
  }

  const CallContext context_;
  const ClusterAcquireRequest request_;
  const Acquired done_;
  storage::AcquireResult local_;
};

}  // namespace

bool MayBeElsewhere(MissReason reason) {
  return reason == MissReason::kAbsent || reason == MissReason::kPending ||
         reason == MissReason::kNotCovered || reason == MissReason::kCorrupt ||
         reason == MissReason::kGeneration;
}

void AcquireAnywhere(const CallContext& context, ClusterAcquireRequest request, Acquired done) {
  if (context.cluster == nullptr) {
    return context.store.Acquire(std::move(request.wanted), std::move(done));
  }
  std::make_shared<AnywhereAcquire>(context, std::move(request), std::move(done))->Start();
}

void FindAnywhere(const CallContext& context, const ClusterAcquireRequest& request,
                  std::function<void(FoundPages)> done) {
  const storage::LookupResult here = context.store.Lookup(request.wanted);
  FoundPages local;
  local.tiers = here.page_tiers;
  local.miss_reason = here.miss_reason;
  const bool complete = here.hit_pages == request.wanted.keys.size();
  if (context.cluster == nullptr || complete || !MayBeElsewhere(here.miss_reason) ||
      request.wanted.deadline <= context.clock.Now()) {
    return done(std::move(local));
  }
  context.cluster->Find(
      PullOfRest(context, request, here.hit_pages),
      [local = std::move(local), done = std::move(done)](const FoundPages& found) mutable {
        const bool says_more = !found.tiers.empty() || (found.miss_reason != MissReason::kNone &&
                                                        found.miss_reason != MissReason::kAbsent);
        if (says_more) local.miss_reason = found.miss_reason;
        local.tiers.insert(local.tiers.end(), found.tiers.begin(), found.tiers.end());
        local.nodes = found.nodes;
        local.page_nodes = found.page_nodes;
        done(std::move(local));
      });
}

}  // namespace crumb::server
