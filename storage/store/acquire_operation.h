// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "common/executor.h"
#include "common/mutex.h"
#include "storage/deadline_timer.h"
#include "storage/host/host_tier.h"
#include "storage/store/pending_hints.h"
#include "storage/store/promoter.h"

namespace crumb::storage {

// The parts that an operation works with; all outlive it.
struct AcquireContext {
  HostTier& host;
  FragmentTier& below;
  Promoter& promoter;
  DeadlineTimer& timer;
  const PendingHints& pending;
  const Clock& clock;
};

// The first pages of a prefix, in host memory, each referred to.
struct FoundPages {
  std::vector<PageHandle> pages;
  std::vector<Tier> tiers;                // [pages] where each was found
  MissReason reason = MissReason::kNone;  // why the next page is missing
  bool part_full = false;                 // its tenant would keep more than its part
};

// One Acquire that host memory alone cannot serve. It reads the missing pages into host memory in
// prefix order, a few at a time, and returns the pages found when all were read, one could not be
// read, or the deadline passed. Lives as long as a callback refers to it. Thread-safe.
class AcquireOperation : public std::enable_shared_from_this<AcquireOperation> {
 public:
  using Done = std::function<void(FoundPages)>;

  // `pages` are references to the first pages of the prefix, found in host memory; `reason` says
  // why the next is not there.
  AcquireOperation(const AcquireContext& context, AcquireRequest request,
                   std::vector<PageHandle> pages, MissReason reason, Done done);

  void Start();

 private:
  // Starts loading pages until enough are under way or there is nothing left to start.
  void Pump();
  void Load(size_t index);
  void LoadFragments(size_t index, std::vector<FragmentMeta> fragments);
  // The page arrived, referred to, or is a miss; `part_full` as in FoundPages.
  void Have(size_t index, PageHandle page, Tier tier);
  void Miss(size_t index, MissReason reason, bool part_full = false);
  // From a reader: the last of a page's fragments ended.
  void Loaded(size_t index, const absl::Status& status);
  // Takes the page from host memory, where it should be now.
  void Settle(size_t index, const absl::Status& status);
  void Expire();
  void FinishIfIdle();
  void Finish();

  const AcquireContext context_;
  const AcquireRequest request_;
  const size_t first_;  // the first page that host memory lacks
  const MissReason first_reason_;

  Mutex mutex_;
  Done done_ ABSL_GUARDED_BY(mutex_);
  std::vector<PageHandle> pages_ ABSL_GUARDED_BY(mutex_);  // kNoPage: not there yet
  std::vector<Tier> tiers_ ABSL_GUARDED_BY(mutex_);
  size_t next_ ABSL_GUARDED_BY(mutex_);  // the first not started
  size_t end_ ABSL_GUARDED_BY(mutex_);   // the first known miss
  size_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  MissReason reason_ ABSL_GUARDED_BY(mutex_) = MissReason::kNone;
  bool part_full_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<DeadlineTimer::Id> deadline_ ABSL_GUARDED_BY(mutex_);
};

// The fragments below that together with `present` cover `range`; empty when they do not.
std::vector<FragmentMeta> FragmentsToLoad(std::span<const FragmentMeta> below,
                                          std::vector<TileRange> present, const TileRange& range,
                                          uint64_t generation);

}  // namespace crumb::storage
