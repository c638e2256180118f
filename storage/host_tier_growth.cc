// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// How a host tier takes memory, moves pages out of slabs that it took over, and gives these back.
#include <algorithm>
#include <cstring>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/host_tier.h"

namespace crumb::storage {
namespace {

// How long pages wait for room to move to, before some leave for it: workers take a moment to let
// slabs go that were given up.
constexpr Duration kPatience = std::chrono::seconds(5);
// After pages of a slab were found pinned the kernel is not made to look at all of them again for
// this long.
constexpr Duration kPinnedRetry = std::chrono::seconds(1);

}  // namespace

uint64_t SlabsBeside(uint64_t held, uint64_t kept, uint64_t revoked, const HostOptions& options) {
  const uint64_t beside =
      held + kept + revoked - std::min(revoked, static_cast<uint64_t>(options.revoked_slabs_max));
  return beside - std::min<uint64_t>(beside, 1);
}

absl::StatusOr<uint64_t> HostTier::Grow(uint64_t bytes) {
  MutexLock growing(&growing_);
  const absl::Status taken = TakeMemory(bytes);
  RenewSlabs();
  CRUMB_RETURN_IF_ERROR(taken);
  MutexLock lock(&mutex_);
  return memory_->missing_bytes() + inherited_.held_bytes() +
         inherited_.leaving().size() * memory_->slab_bytes();
}

absl::Status HostTier::TakeMemory(uint64_t bytes) {
  uint64_t beside;
  {
    MutexLock lock(&mutex_);
    const uint64_t held = inherited_.held_bytes() / memory_->slab_bytes();
    beside = SlabsBeside(held, inherited_.leaving().size(), revoked_, options_.host) *
             memory_->slab_bytes();
  }
  const uint64_t missing = memory_->missing_bytes();
  bytes = std::min(bytes, missing - std::min(missing, beside));
  while (bytes >= SlotAllocator::kChunkBytesMin && memory_->missing_bytes() > 0) {
    const uint64_t before = memory_->missing_bytes();
    CRUMB_ASSIGN_OR_RETURN(const size_t slab, memory_->Grow(bytes));
    bytes -= before - memory_->missing_bytes();
    MutexLock lock(&mutex_);
    SlabState& grown = slabs_[slab];
    grown.bytes = memory_->bytes(slab);
    if (grown.phase == SlabState::Phase::kOwned || grown.phase == SlabState::Phase::kClosing) {
      table_.slots().GrowRegion(static_cast<uint32_t>(slab), grown.bytes);
    }
  }
  return absl::OkStatus();
}

void HostTier::DropLeaving() {
  std::vector<InheritedSlabs::Leaving> leaving;
  {
    MutexLock lock(&mutex_);
    leaving = inherited_.TakeLeaving();
  }
  const TimePoint now = clock_.Now();
  bool blocked = false;  // once is enough while writers wait for memory
  std::erase_if(leaving, [&](InheritedSlabs::Leaving& slab) {
    if (blocked || slab.retry > now) return false;
    const SlabMemory::Drop drop = GiveBackUnread(slab.file);
    blocked = drop == SlabMemory::Drop::kPinned;
    if (blocked) slab.retry = now + kPinnedRetry;
    return drop == SlabMemory::Drop::kDropped;
  });
  MutexLock lock(&mutex_);
  inherited_.PutLeaving(std::move(leaving));
}

void HostTier::RenewSlabs() {
  DropLeaving();
  std::vector<uint32_t> held;
  {
    MutexLock lock(&mutex_);
    held = inherited_.Held();
  }
  // Workers may hold on to what was given up for as long as a sequence takes.
  const uint64_t taken = memory_->total_bytes() - memory_->missing_bytes();
  const bool memory_is_back = taken >= given_up_bytes_;
  for (const uint32_t region : held) {
    std::vector<PageHandle> owners;
    {
      MutexLock lock(&mutex_);
      // Part of a slab's pages would free nothing, and take the room that writers have meanwhile.
      const bool fits = table_.slots().used_bytes() + inherited_.used_bytes(region) <= taken;
      const bool waited = memory_is_back && clock_.Now() >= progress_ + kPatience;
      if (!fits && !waited) return;
      owners = inherited_.OwnersIn(region);
    }
    bool evicting = false;
    for (const PageHandle page : owners) {
      Move move = MovePage(page, region);
      if (move == Move::kNoRoom && TakeIdleSlab(page)) move = MovePage(page, region);
      if (move == Move::kMoved) progress_ = clock_.Now();
      if (move != Move::kNoRoom) continue;
      evicting |= memory_is_back && clock_.Now() >= progress_ + kPatience;
      if (!evicting) return;
      EvictForRoom(page);
    }
    if (GiveUpIfEmpty(region)) {
      progress_ = clock_.Now();
      DropLeaving();
    }
    if (!evicting) continue;
    progress_ = clock_.Now();  // one slab at a time: its memory may be all that is needed
    return;
  }
}

void HostTier::EvictForRoom(PageHandle page) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&mutex_);
    if (table_[page].resident && table_[page].references == 0) {
      table_.Remove(page, RemovalReason::kCapacity, clock_.Now());
    }
    changes = table_.TakeChanges();
  }
  Announce(changes);
}

HostTier::Move HostTier::MovePage(PageHandle handle, uint32_t region) {
  struct Copy {
    TileRange range;
    uint32_t bytes = 0;
    Slot from;
    Slot to;
  };
  std::vector<Copy> copies;
  const auto give_back = [&] {
    mutex_.AssertHeld();
    for (const Copy& copy : copies) table_.slots().Free(copy.to);
  };
  {
    MutexLock lock(&mutex_);
    const Page& page = table_[handle];
    if (!page.resident) return Move::kGone;
    if (page.references > 0) return Move::kInUse;
    for (const Fragment& fragment : page.fragments) {
      if (fragment.slot.region != region) continue;
      const auto slot = Allocate(fragment.bytes, table_.ShareOf(page.keyspace));
      if (!slot) {
        give_back();
        return Move::kNoRoom;
      }
      copies.push_back({fragment.range, fragment.bytes, fragment.slot, *slot});
    }
    if (copies.empty()) return Move::kGone;
    table_.Ref(handle);
  }
  for (const Copy& copy : copies) {
    std::memcpy(Memory(copy.to).data(), Memory(copy.from).data(), copy.bytes);
  }
  MutexLock lock(&mutex_);
  // A reference that was taken meanwhile reads where the page was.
  const bool still = table_[handle].resident && table_[handle].references == 1;
  if (still) {
    for (const Copy& copy : copies) table_.MoveFragment(handle, copy.range, copy.to);
  } else {
    give_back();
  }
  table_.Unref(handle);
  return still ? Move::kMoved : Move::kInUse;
}

bool HostTier::GiveUpIfEmpty(uint32_t region) {
  {
    MutexLock lock(&mutex_);
    if (inherited_.used_bytes(region) > 0) return false;
    const absl::Status given_up = inherited_.GiveUp(region);
    if (!given_up.ok()) {
      LogWarning("host tier: {}", given_up.ToString());
      return false;
    }
  }
  given_up_bytes_ += memory_->slab_bytes();
  if (options_.slab_gone) options_.slab_gone(region);
  return true;
}

}  // namespace crumb::storage
