// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/acquire_operation.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "storage/coverage.h"

namespace crumb::storage {
namespace {

// Pages that one operation loads at a time: keeps the disk busy, and lets others in.
constexpr size_t kPagesUnderWayMax = 16;

MissReason ReasonOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
      return MissReason::kCorrupt;
    case absl::StatusCode::kNotFound:
      return MissReason::kAbsent;
    case absl::StatusCode::kAborted:
      return MissReason::kGeneration;
    default:
      return MissReason::kBusy;
  }
}

}  // namespace

std::vector<FragmentMeta> FragmentsToLoad(std::span<const FragmentMeta> below,
                                          std::vector<TileRange> present, const TileRange& range,
                                          uint64_t generation) {
  std::vector<FragmentMeta> chosen;
  for (const FragmentMeta& fragment : below) {
    const bool known = std::any_of(present.begin(), present.end(), [&](const TileRange& there) {
      return Overlaps(there, fragment.range);
    });
    if (known || fragment.generation < generation || !Overlaps(fragment.range, range)) continue;
    present.push_back(fragment.range);
    chosen.push_back(fragment);
  }
  if (!Covers(present, range)) chosen.clear();
  return chosen;
}

AcquireOperation::AcquireOperation(const AcquireContext& context, AcquireRequest request,
                                   std::vector<PageHandle> pages, MissReason reason, Done done)
    : context_(context),
      request_(std::move(request)),
      first_(pages.size()),
      first_reason_(reason),
      done_(std::move(done)),
      pages_(std::move(pages)),
      next_(first_),
      end_(request_.keys.size()) {
  pages_.resize(request_.keys.size(), kNoPage);
  tiers_.resize(request_.keys.size(), Tier::kHost);
}

void AcquireOperation::Start() {
  {
    MutexLock lock(&mutex_);
    if (request_.deadline != TimePoint::max()) {
      deadline_ = context_.timer.Schedule(request_.deadline,
                                          [self = shared_from_this()] { self->Expire(); });
    }
  }
  Pump();
}

void AcquireOperation::Pump() {
  while (true) {
    size_t index;
    {
      MutexLock lock(&mutex_);
      if (finished_ || next_ >= end_ || under_way_ >= kPagesUnderWayMax) break;
      index = next_++;
      ++under_way_;
    }
    Load(index);
  }
  FinishIfIdle();
}

void AcquireOperation::Load(size_t index) {
  MissReason reason;
  const std::vector<PageHandle> found =
      context_.host.RefPrefix(request_, index, index + 1, &reason);
  if (!found.empty()) return Have(index, found[0], Tier::kHost);
  if (reason == MissReason::kBusy) return Miss(index, reason, /*part_full=*/true);
  const PageKey& key = request_.keys[index];
  const std::vector<FragmentMeta> below = context_.below.Find(request_.keyspace, key);
  const std::vector<TileRange> present =
      context_.host.Present(request_.keyspace, key, request_.generation);
  // Another operation brought it meanwhile.
  if (Covers(present, request_.range)) return Settle(index, absl::OkStatus());
  std::vector<FragmentMeta> wanted =
      FragmentsToLoad(below, present, request_.range, request_.generation);
  if (!wanted.empty()) return LoadFragments(index, std::move(wanted));
  if (index == first_ && reason == MissReason::kAbsent) reason = first_reason_;
  if (!below.empty() && below[0].generation < request_.generation) {
    reason = MissReason::kGeneration;
    context_.promoter.DropStale(below[0]);
  } else if (!below.empty() && reason == MissReason::kAbsent) {
    reason = MissReason::kNotCovered;
  }
  if (reason == MissReason::kAbsent && context_.pending.Has(request_.keyspace, key)) {
    reason = MissReason::kPending;
  }
  Miss(index, reason);
}

void AcquireOperation::LoadFragments(size_t index, std::vector<FragmentMeta> fragments) {
  if (context_.clock.Now() >= request_.deadline) return Miss(index, MissReason::kDeadline);
  // A page of several fragments is there when the last has come; the first error counts.
  struct Progress {
    Mutex mutex;
    size_t left ABSL_GUARDED_BY(mutex) = 0;
    absl::Status status ABSL_GUARDED_BY(mutex);
  };
  auto progress = std::make_shared<Progress>();
  {
    MutexLock lock(&progress->mutex);
    progress->left = fragments.size();
  }
  for (const FragmentMeta& fragment : fragments) {
    context_.promoter.Promote(
        fragment, [self = shared_from_this(), index, progress](const absl::Status& status) {
          absl::Status result;
          {
            MutexLock lock(&progress->mutex);
            if (progress->status.ok()) progress->status = status;
            if (--progress->left > 0) return;
            result = progress->status;
          }
          self->Loaded(index, result);
        });
  }
}

void AcquireOperation::Loaded(size_t index, const absl::Status& status) {
  Settle(index, status);
  Pump();
}

void AcquireOperation::Settle(size_t index, const absl::Status& status) {
  // Looked for even after an error: another commit may have brought the page meanwhile.
  MissReason reason;
  const std::vector<PageHandle> found =
      context_.host.RefPrefix(request_, index, index + 1, &reason);
  if (!found.empty()) {
    Have(index, found[0], Tier::kSsd);
  } else if (reason == MissReason::kBusy) {
    Miss(index, reason, /*part_full=*/true);
  } else {
    Miss(index, status.ok() ? MissReason::kBusy : ReasonOf(status));
  }
}

void AcquireOperation::Have(size_t index, PageHandle page, Tier tier) {
  {
    MutexLock lock(&mutex_);
    --under_way_;
    if (!finished_) {
      pages_[index] = page;
      tiers_[index] = tier;
      return;
    }
  }
  context_.host.Unref(std::span(&page, 1));
}

void AcquireOperation::Miss(size_t index, MissReason reason, bool part_full) {
  MutexLock lock(&mutex_);
  --under_way_;
  if (index >= end_) return;
  end_ = index;
  reason_ = reason;
  part_full_ = part_full;
}

void AcquireOperation::Expire() {
  {
    MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    const auto missing = std::find(pages_.begin(), pages_.end(), kNoPage) - pages_.begin();
    if (static_cast<size_t>(missing) < end_) {
      reason_ = MissReason::kDeadline;
      part_full_ = false;
    }
  }
  Finish();
}

void AcquireOperation::FinishIfIdle() {
  {
    MutexLock lock(&mutex_);
    if (finished_ || under_way_ > 0 || next_ < end_) return;
    finished_ = true;
  }
  Finish();
}

void AcquireOperation::Finish() {
  std::vector<PageHandle> pages;
  std::vector<PageHandle> beyond;
  std::vector<Tier> tiers;
  MissReason reason;
  bool part_full;
  Done done;
  {
    MutexLock lock(&mutex_);
    pages.swap(pages_);
    tiers.swap(tiers_);
    reason = reason_;
    part_full = part_full_;
    done = std::move(done_);
    if (deadline_) context_.timer.Cancel(*deadline_);
  }
  const auto prefix_end = std::find(pages.begin(), pages.end(), kNoPage);
  std::copy_if(prefix_end, pages.end(), std::back_inserter(beyond),
               [](PageHandle page) { return page != kNoPage; });
  pages.erase(prefix_end, pages.end());
  tiers.resize(pages.size());
  context_.host.Unref(beyond);
  done({std::move(pages), std::move(tiers), reason, part_full});
}

}  // namespace crumb::storage
