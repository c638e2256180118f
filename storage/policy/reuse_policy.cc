// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/reuse_policy.h"

#include <algorithm>

namespace crumb::storage {
namespace {

constexpr size_t kRememberedPerItem = 8;
constexpr size_t kEpochsPerCapacity = 8;
// Learning takes some 50 us; in a tiny tier it waits for this many insertions.
constexpr size_t kEpochInsertionsMin = 16;
// Parked items that go back to their queues with each insertion: twice as many in an epoch as a
// full tier can have.
constexpr size_t kUnparkedPerInsertion = 2 * kEpochsPerCapacity;

}  // namespace

ReusePolicy::ReusePolicy(size_t capacity_items)
    : epoch_insertions_(std::max(capacity_items / kEpochsPerCapacity, kEpochInsertionsMin)),
      ghosts_(kRememberedPerItem * capacity_items) {
  for (size_t i = 0; i < kQueues; ++i) queues_.emplace_back(links_);
  RankQueues();
}

void ReusePolicy::SetOrder(Order order) {
  if (order == order_) return;
  order_ = order;
  RankQueues();
}

ItemHandle ReusePolicy::Insert(const ItemInfo& info) {
  if (++insertions_ % epoch_insertions_ == 0) AdvanceEpoch();
  const ItemHandle item = table_.Add(info, access_);
  Unpark(std::min(to_unpark_, kUnparkedPerInsertion));
  states_.GrowTo(table_.handle_end());
  states_[item] = State();
  if (const std::optional<Ghost> ghost = ghosts_.Take(info.fingerprint)) {
    model_.End(ReuseModel::ClassOf(ghost->uses), ghost->epoch, ReuseModel::Ending::kUsed);
    states_[item].uses = ghost->uses + 1;
  }
  BeginPeriod(item);
  if (!info.has_children) Enqueue(item, End::kNewest);
  return item;
}

void ReusePolicy::SetHasChildren(ItemHandle item, bool has_children) {
  table_.SetHasChildren(item, has_children);
  if (has_children) {
    Dequeue(item);
  } else {
    // A parent that lost its last child is at least as old as that child was.
    Enqueue(item, End::kOldest);
  }
}

void ReusePolicy::Hit(ItemHandle item) {
  table_.Touch(item, access_);
  Dequeue(item);
  EndPeriod(item, ReuseModel::Ending::kUsed);
  ++states_[item].uses;
  BeginPeriod(item);
  if (table_.IsLeaf(item)) Enqueue(item, End::kNewest);
}

void ReusePolicy::Remove(ItemHandle item, Removal reason) {
  Dequeue(item);
  if (reason == Removal::kDeleted) {
    EndPeriod(item, ReuseModel::Ending::kGivenUp);
  } else if (const std::optional<Ghost> dropped =
                 ghosts_.Add({.fingerprint = table_[item].fingerprint,
                              .epoch = states_[item].epoch,
                              .uses = states_[item].uses})) {
    model_.End(ReuseModel::ClassOf(dropped->uses), dropped->epoch, ReuseModel::Ending::kGivenUp);
  }
  table_.Remove(item);
}

std::optional<ItemHandle> ReusePolicy::FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                                  size_t& steps) {
  std::optional<ItemHandle> victim = SearchQueues(is_pinned, steps);
  // All that is left was pinned when it was met: looks at it once more.
  for (size_t left = parked_.size(); !victim && left > 0 && steps > 0;) {
    const size_t count = std::min(left, std::max<size_t>(steps / 2, 1));
    left -= count;
    steps -= count;
    Unpark(count);
    victim = SearchQueues(is_pinned, steps);
  }
  return victim;
}

PolicyUsage ReusePolicy::Usage() const {
  return {.items = table_.size(),
          .ghosts = ghosts_.size(),
          .memory_bytes = sizeof(*this) + table_.MemoryBytes() + links_.MemoryBytes() +
                          ghosts_.MemoryBytes() + states_.MemoryBytes() +
                          kQueues * sizeof(ItemQueue)};
}

void ReusePolicy::BeginPeriod(ItemHandle item) {
  states_[item].epoch = model_.epoch();
  model_.Begin(ReuseModel::ClassOf(states_[item].uses));
}

void ReusePolicy::EndPeriod(ItemHandle item, ReuseModel::Ending ending) {
  model_.End(ReuseModel::ClassOf(states_[item].uses), states_[item].epoch, ending);
}

// The queues of a class form a ring by epoch of last use; those of the last age have one apart.
uint16_t ReusePolicy::QueueAt(size_t item_class, size_t age) const {
  constexpr size_t kRing = ReuseModel::kAges - 1;
  const size_t slot = age == kRing ? kRing : (model_.epoch() + kRing - age) % kRing;
  return static_cast<uint16_t>(item_class * ReuseModel::kAges + slot);
}

uint16_t ReusePolicy::QueueFor(ItemHandle item) const {
  const State& state = states_[item];
  return QueueAt(ReuseModel::ClassOf(state.uses), model_.AgeOf(state.epoch));
}

void ReusePolicy::Enqueue(ItemHandle item, End end) {
  const uint16_t queue = QueueFor(item);
  states_[item].where = Where::kQueued;
  if (end == End::kNewest) {
    queues_[queue].PushNewest(item);
  } else {
    queues_[queue].PushOldest(item);
  }
  first_ = std::min(first_, place_[queue]);
}

void ReusePolicy::Dequeue(ItemHandle item) {
  Where& where = states_[item].where;
  if (where == Where::kNowhere) return;
  (where == Where::kParked ? parked_ : queues_[QueueFor(item)]).Remove(item);
  where = Where::kNowhere;
}

std::optional<ItemHandle> ReusePolicy::SearchQueues(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                                    size_t& steps) {
  for (; first_ < kQueues; ++first_) {
    const ItemQueue& queue = queues_[ranking_[first_]];
    while (queue.oldest() != kNoItem) {
      if (steps == 0) return std::nullopt;
      --steps;
      const ItemHandle item = queue.oldest();
      if (!is_pinned(item)) return item;
      Dequeue(item);
      states_[item].where = Where::kParked;
      parked_.PushNewest(item);
    }
  }
  return std::nullopt;
}

// Pinned leaves wait aside until the next epoch, so that each is examined once in it, and count as
// used then. The model does not count a use; it records that their period was cut short.
void ReusePolicy::Unpark(size_t count) {
  to_unpark_ -= std::min(to_unpark_, count);
  for (; count > 0 && parked_.oldest() != kNoItem; --count) {
    const ItemHandle item = parked_.oldest();
    Dequeue(item);
    EndPeriod(item, ReuseModel::Ending::kGivenUp);
    BeginPeriod(item);
    Enqueue(item, End::kNewest);
  }
}

void ReusePolicy::AdvanceEpoch() {
  model_.AdvanceEpoch();
  // The slot that the new epoch takes over holds items that reach the last age now.
  for (size_t c = 0; c < ReuseModel::kClasses; ++c) {
    queues_[QueueAt(c, ReuseModel::kAges - 1)].TakeAll(queues_[QueueAt(c, 0)]);
  }
  to_unpark_ = parked_.size();
  RankQueues();
}

void ReusePolicy::RankQueues() {
  struct Rank {
    double worth;
    size_t age;
    uint16_t queue;
  };
  std::array<Rank, kQueues> ranks;
  size_t n = 0;
  for (size_t c = 0; c < ReuseModel::kClasses; ++c) {
    for (size_t age = 0; age < ReuseModel::kAges; ++age) {
      const double worth = order_ == Order::kWorth ? model_.Worth(c, age) : 0.0;
      ranks[n++] = {worth, age, QueueAt(c, age)};
    }
  }
  std::sort(ranks.begin(), ranks.end(), [](const Rank& a, const Rank& b) {
    if (a.worth != b.worth) return a.worth < b.worth;
    if (a.age != b.age) return a.age > b.age;
    return a.queue < b.queue;
  });
  for (uint16_t place = 0; place < kQueues; ++place) {
    ranking_[place] = ranks[place].queue;
    place_[ranks[place].queue] = place;
  }
  first_ = 0;
}

}  // namespace crumb::storage
