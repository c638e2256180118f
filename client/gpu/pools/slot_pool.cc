// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/pools/slot_pool.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/placement.h"
#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<SlotPool>> SlotPool::Create(
    Device& device, std::shared_ptr<const TimelineSet> timelines, std::string name,
    size_t slot_bytes, int count) {
  auto pool = CreateEmpty(device, std::move(timelines), std::move(name), slot_bytes, count);
  CRUMB_RETURN_IF_ERROR(pool->Provide());
  return pool;
}

std::unique_ptr<SlotPool> SlotPool::CreateEmpty(Device& device,
                                                std::shared_ptr<const TimelineSet> timelines,
                                                std::string name, size_t slot_bytes, int count) {
  auto state = std::make_shared<State>();
  state->device = &device;
  state->slot_bytes = slot_bytes;
  state->count = count;
  state->timelines = std::move(timelines);
  return std::unique_ptr<SlotPool>(new SlotPool(std::move(name), std::move(state)));
}

absl::Status SlotPool::Provide() {
  MutexLock providing(&state_->provide_mutex);
  if (state_->memory.get() != 0 || state_->count == 0) return absl::OkStatus();
  CRUMB_ASSIGN_OR_RETURN(state_->memory,
                         NewDeviceBuffer(*state_->device, state_->slot_bytes * state_->count));
  const DeviceAddress first = state_->memory.get();
  MutexLock lock(&state_->mutex);
  for (int i = state_->count; i-- > 0;) state_->unused.push_back(first + state_->slot_bytes * i);
  return absl::OkStatus();
}

absl::StatusOr<bool> SlotPool::WaitForUsers(std::span<const PassRef> users, DeviceStream stream,
                                            std::vector<PassRef>* waited) {
  for (const PassRef& user : users) {
    if (user.timeline->stream() == stream) continue;  // the stream keeps the order
    const auto known = std::find_if(waited->begin(), waited->end(), [&](const PassRef& moment) {
      return moment.timeline == user.timeline;
    });
    if (known != waited->end() && known->pass >= user.pass) continue;
    CRUMB_ASSIGN_OR_RETURN(const bool waits, user.timeline->MakeWait(stream, user.pass));
    if (!waits) return false;
    if (known == waited->end()) {
      waited->push_back(user);
    } else {
      known->pass = user.pass;
    }
  }
  return true;
}

absl::Status SlotPool::Gather(State& state, int count, DeviceStream stream,
                              std::vector<DeviceAddress>* taken) {
  while (static_cast<int>(taken->size()) < count && !state.unused.empty()) {
    taken->push_back(state.unused.back());
    state.unused.pop_back();
  }
  // passes for which `stream` waits already; slots released together have the same
  std::vector<PassRef> waited;
  std::shared_ptr<const std::vector<PassRef>> last;  // passes of the last usable slot
  // Slots with passes that have not ended go to the end of the queue.
  for (size_t tries = state.retired.size(); tries-- > 0;) {
    if (static_cast<int>(taken->size()) == count) return absl::OkStatus();
    Retired slot = std::move(state.retired.front());
    state.retired.pop_front();
    const absl::StatusOr<bool> usable =
        slot.users == last ? true : WaitForUsers(*slot.users, stream, &waited);
    if (usable.ok() && *usable) {
      taken->push_back(slot.address);
      last = std::move(slot.users);
    } else {
      state.retired.push_back(std::move(slot));
    }
    CRUMB_RETURN_IF_ERROR(usable.status());
  }
  return absl::OkStatus();
}

// A group of private slots that is released together.
struct SlotPool::PrivateSlots {
  explicit PrivateSlots(std::shared_ptr<State> of) : state(std::move(of)) {}
  PrivateSlots(const PrivateSlots&) = delete;
  PrivateSlots& operator=(const PrivateSlots&) = delete;
  ~PrivateSlots() {
    const auto now = std::make_shared<const std::vector<PassRef>>(state->timelines->Now());
    MutexLock lock(&state->mutex);
    for (const SlotRef& slot : slots) state->retired.push_back({slot.address, now});
  }

  const std::shared_ptr<State> state;
  std::vector<SlotRef> slots;
};

SlotPool::Slots SlotPool::Private(const std::shared_ptr<State>& state,
                                  std::span<const DeviceAddress> addresses) {
  const auto run = std::make_shared<PrivateSlots>(state);
  run->slots.reserve(addresses.size());
  Slots slots;
  slots.reserve(addresses.size());
  for (const DeviceAddress address : addresses) {
    slots.emplace_back(run, &run->slots.emplace_back(SlotRef{address, nullptr}));
  }
  return slots;
}

// `run` slots form a group that is released together.
absl::StatusOr<SlotPool::Slots> SlotPool::TakePrivate(int count, int run, DeviceStream stream) {
  std::vector<DeviceAddress> taken;
  {
    MutexLock lock(&state_->mutex);
    const absl::Status gathered = Gather(*state_, count, stream, &taken);
    if (!gathered.ok() || static_cast<int>(taken.size()) < count) {
      // `stream` waits for their users, but the stream of the next user may not.
      const auto now = std::make_shared<const std::vector<PassRef>>(state_->timelines->Now());
      for (const DeviceAddress address : taken) state_->retired.push_back({address, now});
      CRUMB_RETURN_IF_ERROR(gathered);
      return absl::ResourceExhaustedError("no room for " + std::to_string(count) + " more " +
                                          name_ + ": end other sequences first");
    }
  }
  Slots slots;
  slots.reserve(taken.size());
  for (std::span<const DeviceAddress> rest = taken; !rest.empty();) {
    const auto together = rest.first(std::min(rest.size(), static_cast<size_t>(run)));
    rest = rest.subspan(together.size());
    Slots made = Private(state_, together);
    std::move(made.begin(), made.end(), std::back_inserter(slots));
  }
  return slots;
}

DevicePool* SlotPool::shared() const {
  MutexLock lock(&state_->mutex);
  return state_->shared;
}

void SlotPool::Share(DevicePool& pool, Background& background) {
  MutexLock lock(&state_->mutex);
  state_->shared = &pool;
  state_->background = &background;
}

void SlotPool::StopSharing() {
  {
    MutexLock lock(&state_->mutex);
    state_->shared = nullptr;
    state_->background = nullptr;
  }
  Drain(*state_);
}

std::shared_ptr<const SlotRef> SlotPool::AdoptOne(std::shared_ptr<const DeviceSlot> slot) {
  const DeviceAddress address = slot->address();
  return Adopt({{address, std::move(slot)}}).front();
}

absl::StatusOr<SlotPool::Slots> SlotPool::Take(int count, DeviceStream stream) {
  Slots slots;
  if (DevicePool* pool = shared()) {
    while (static_cast<int>(slots.size()) < count) {
      auto blank = pool->TakeBlank();
      if (blank == nullptr) break;
      slots.push_back(AdoptOne(std::move(blank)));
    }
  }
  CRUMB_ASSIGN_OR_RETURN(const Slots rest,
                         TakePrivate(count - static_cast<int>(slots.size()), 1, stream));
  slots.insert(slots.end(), rest.begin(), rest.end());
  return slots;
}

absl::StatusOr<SlotPool::Slots> SlotPool::TakeSome(int count, DeviceStream stream,
                                                   Duration timeout) {
  Slots slots;
  slots.reserve(static_cast<size_t>(std::max(count, 0)));
  if (DevicePool* pool = shared()) {
    auto blanks = pool->Reserve(count, timeout, kRunPages);
    for (size_t begin = 0; begin < blanks.size(); begin += kRunPages) {
      const size_t end = std::min(blanks.size(), begin + kRunPages);
      std::vector<SlotRef> run;
      run.reserve(end - begin);
      for (size_t i = begin; i < end; ++i) {
        const DeviceAddress address = blanks[i]->address();
        run.push_back({address, std::move(blanks[i])});
      }
      Slots adopted = Adopt(std::move(run));
      std::move(adopted.begin(), adopted.end(), std::back_inserter(slots));
    }
  }
  const int missing = count - static_cast<int>(slots.size());
  // Other callers may take free slots meanwhile; fewer slots suffice here.
  auto rest = TakePrivate(std::min(missing, free()), kRunPages, stream);
  if (rest.ok()) std::move(rest->begin(), rest->end(), std::back_inserter(slots));
  if (!rest.ok() && !absl::IsResourceExhausted(rest.status())) return rest.status();
  return slots;
}

// A group of a device pool's slots that is released together.
struct SlotPool::AdoptedSlots {
  AdoptedSlots(std::vector<SlotRef> taken, std::shared_ptr<State> owner)
      : slots(std::make_shared<const std::vector<SlotRef>>(std::move(taken))),
        state(std::move(owner)) {}
  AdoptedSlots(const AdoptedSlots&) = delete;
  AdoptedSlots& operator=(const AdoptedSlots&) = delete;
  ~AdoptedSlots() { GiveUp(state, std::move(slots)); }

  std::shared_ptr<const std::vector<SlotRef>> slots;
  const std::shared_ptr<State> state;
};

SlotPool::Slots SlotPool::Adopt(std::vector<SlotRef> slots) {
  const auto adopted = std::make_shared<const AdoptedSlots>(std::move(slots), state_);
  Slots made;
  made.reserve(adopted->slots->size());
  for (const SlotRef& slot : *adopted->slots) made.emplace_back(adopted, &slot);
  return made;
}

void SlotPool::GiveUp(const std::shared_ptr<State>& state,
                      std::shared_ptr<const std::vector<SlotRef>> slots) {
  std::vector<PassRef> now = state->timelines->Now();
  bool inline_now;
  {
    MutexLock lock(&state->mutex);
    state->leaving.push_back({std::move(slots), std::move(now)});
    inline_now = state->background == nullptr;
    DrainSoon(state);
  }
  if (inline_now) Drain(*state);
}

// Adds the task under the lock, because StopSharing's caller may end the thread afterwards.
void SlotPool::DrainSoon(const std::shared_ptr<State>& state) {
  if (state->background == nullptr || std::exchange(state->draining, true)) return;
  state->background->Add([state] { Drain(*state); });
}

void SlotPool::PassEnded() {
  MutexLock lock(&state_->mutex);
  if (!state_->leaving.empty()) DrainSoon(state_);
}

void SlotPool::Drain(State& state) {
  std::vector<Leaving> leaving;
  bool stopped;
  {
    MutexLock lock(&state.mutex);
    leaving.swap(state.leaving);
    state.draining = false;
    stopped = state.background == nullptr;
  }
  std::vector<Leaving> open;
  for (Leaving& one : leaving) {
    const bool ended = std::all_of(one.users.begin(), one.users.end(), [](const PassRef& user) {
      return user.timeline->Ended(user.pass);
    });
    if (!ended && !stopped) {
      open.push_back(std::move(one));
      continue;
    }
    for (const PassRef& user : one.users) user.timeline->Synchronize(user.pass).IgnoreError();
    one.slots.reset();
  }
  MutexLock lock(&state.mutex);
  state.leaving.insert(state.leaving.end(), std::make_move_iterator(open.begin()),
                       std::make_move_iterator(open.end()));
}

int SlotPool::free() const {
  MutexLock lock(&state_->mutex);
  return static_cast<int>(state_->unused.size() + state_->retired.size());
}

}  // namespace crumb::client
