// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/slab_growth.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::storage {
namespace {

// How long pages wait for room to move to, before some leave for it: workers take a moment to let
// slabs go that were given up.
constexpr Duration kPatience = std::chrono::seconds(5);

}  // namespace

uint64_t SlabsBeside(uint64_t held, uint64_t kept, uint64_t revoked, const HostOptions& options) {
  const uint64_t beside =
      held + kept + revoked - std::min(revoked, static_cast<uint64_t>(options.revoked_slabs_max));
  return beside - std::min<uint64_t>(beside, 1);
}

absl::StatusOr<uint64_t> SlabGrowth::Grow(uint64_t bytes) {
  MutexLock growing(&growing_);
  const absl::Status taken = TakeMemory(bytes);
  EmptyInherited();
  CRUMB_RETURN_IF_ERROR(taken);
  MutexLock lock(&state_.mutex);
  return state_.memory->missing_bytes() + state_.inherited.held_bytes() +
         state_.inherited.leaving().size() * state_.memory->slab_bytes();
}

absl::Status SlabGrowth::TakeMemory(uint64_t bytes) {
  uint64_t beside;
  {
    MutexLock lock(&state_.mutex);
    const uint64_t held = state_.inherited.held_bytes() / state_.memory->slab_bytes();
    beside = SlabsBeside(held, state_.inherited.leaving().size(), state_.slabs.revoked_sum(),
                         state_.options.host) *
             state_.memory->slab_bytes();
  }
  const uint64_t missing = state_.memory->missing_bytes();
  bytes = std::min(bytes, missing - std::min(missing, beside));
  while (bytes >= SlotAllocator::kChunkBytesMin && state_.memory->missing_bytes() > 0) {
    const uint64_t before = state_.memory->missing_bytes();
    CRUMB_ASSIGN_OR_RETURN(const size_t slab, state_.memory->Grow(bytes));
    bytes -= before - state_.memory->missing_bytes();
    MutexLock lock(&state_.mutex);
    state_.slabs.Grow(static_cast<uint32_t>(slab), state_.memory->bytes(slab));
  }
  return absl::OkStatus();
}

void SlabGrowth::DropLeaving() {
  std::vector<InheritedSlabs::Leaving> leaving;
  {
    MutexLock lock(&state_.mutex);
    leaving = state_.inherited.TakeLeaving();
  }
  // One look that finds pinned pages is enough while others wait for memory. That slab goes to the
  // end, so that each has its turn.
  const bool retry = state_.clock.Now() >= kept_retry_;
  std::optional<InheritedSlabs::Leaving> pinned;
  std::vector<InheritedSlabs::Leaving> kept;
  for (InheritedSlabs::Leaving& slab : leaving) {
    const bool look = !pinned && (!slab.pinned || retry);
    const SlabMemory::Drop drop = look ? GiveBackUnread(slab.file) : SlabMemory::Drop::kHeld;
    if (drop == SlabMemory::Drop::kDropped) continue;
    if (look) slab.pinned = drop == SlabMemory::Drop::kPinned;
    if (look && slab.pinned) {
      pinned = std::move(slab);
    } else {
      kept.push_back(std::move(slab));
    }
  }
  const bool found_pinned = pinned.has_value();
  if (found_pinned) {
    kept_retry_ = state_.clock.Now() + SlabOwners::kPinnedRetry;
    kept.push_back(*std::move(pinned));
  }
  MutexLock lock(&state_.mutex);
  state_.inherited.PutLeaving(std::move(kept));
  if (found_pinned) state_.slabs.NotePinnedCheck();
}

void SlabGrowth::EmptyInherited() {
  DropLeaving();
  std::vector<uint32_t> held;
  {
    MutexLock lock(&state_.mutex);
    held = state_.inherited.Held();
  }
  // Workers may use a slab that was given up for as long as a sequence takes.
  const uint64_t taken = state_.memory->total_bytes() - state_.memory->missing_bytes();
  const bool memory_is_back = taken >= given_up_bytes_;
  for (const uint32_t region : held) {
    std::vector<PageHandle> owners;
    {
      MutexLock lock(&state_.mutex);
      // Part of a slab's pages would free nothing, and take the room that writers have meanwhile.
      const bool fits =
          state_.slots.own().used_bytes() + state_.inherited.used_bytes(region) <= taken;
      const bool waited = memory_is_back && state_.clock.Now() >= progress_ + kPatience;
      if (!fits && !waited) return;
      owners = state_.inherited.OwnersIn(region);
    }
    bool evicting = false;
    for (const PageHandle page : owners) {
      Move move = MovePage(page, region);
      if (move == Move::kNoRoom && room_.TakeIdleSlab(page)) move = MovePage(page, region);
      if (move == Move::kMoved) progress_ = state_.clock.Now();
      if (move != Move::kNoRoom) continue;
      evicting |= memory_is_back && state_.clock.Now() >= progress_ + kPatience;
      if (!evicting) return;
      EvictForRoom(page);
    }
    if (GiveUpIfEmpty(region)) {
      progress_ = state_.clock.Now();
      DropLeaving();
    }
    if (!evicting) continue;
    progress_ = state_.clock.Now();  // one slab at a time: its memory may be all that is needed
    return;
  }
}

void SlabGrowth::EvictForRoom(PageHandle page) {
  std::vector<PageTable::Change> changes;
  {
    MutexLock lock(&state_.mutex);
    if (state_.table[page].resident && state_.table[page].references == 0) {
      state_.table.Remove(page, RemovalReason::kCapacity, state_.clock.Now());
    }
    changes = state_.table.TakeChanges();
  }
  state_.Announce(changes);
}

SlabGrowth::Move SlabGrowth::MovePage(PageHandle handle, uint32_t region) {
  struct Copy {
    TileRange range;
    uint32_t bytes = 0;
    Slot from;
    Slot to;
  };
  std::vector<Copy> copies;
  const auto give_back = [&] {
    state_.mutex.AssertHeld();
    for (const Copy& copy : copies) state_.slabs.Free(copy.to);
  };
  {
    MutexLock lock(&state_.mutex);
    const Page& page = state_.table[handle];
    if (!page.resident) return Move::kGone;
    if (page.references > 0) return Move::kInUse;
    for (const Fragment& fragment : page.fragments) {
      if (fragment.slot.region != region) continue;
      const auto slot =
          state_.slabs.Allocate(fragment.bytes, state_.table.pages().PartitionOf(page.keyspace));
      if (!slot) {
        give_back();
        return Move::kNoRoom;
      }
      copies.push_back({fragment.range, fragment.bytes, fragment.slot, *slot});
    }
    if (copies.empty()) return Move::kGone;
    state_.table.Ref(handle);
  }
  for (const Copy& copy : copies) {
    std::memcpy(state_.Memory(copy.to).data(), state_.Memory(copy.from).data(), copy.bytes);
  }
  MutexLock lock(&state_.mutex);
  // A reference that was taken meanwhile reads where the page was.
  const bool still = state_.table[handle].resident && state_.table[handle].references == 1;
  if (still) {
    for (const Copy& copy : copies) state_.table.MoveFragment(handle, copy.range, copy.to);
  } else {
    give_back();
  }
  state_.table.Unref(handle);
  return still ? Move::kMoved : Move::kInUse;
}

bool SlabGrowth::GiveUpIfEmpty(uint32_t region) {
  {
    MutexLock lock(&state_.mutex);
    if (state_.inherited.used_bytes(region) > 0) return false;
    const absl::Status given_up = state_.inherited.GiveUp(region);
    if (!given_up.ok()) {
      LogWarning("host tier: {}", given_up.ToString());
      return false;
    }
  }
  given_up_bytes_ += state_.memory->slab_bytes();
  if (state_.options.slab_gone) state_.options.slab_gone(region);
  return true;
}

}  // namespace crumb::storage
