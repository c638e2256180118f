// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/reuse_policy.h"

#include <algorithm>
#include <array>
#include <deque>
#include <numeric>

#include "storage/policy/chain_table.h"
#include "storage/policy/ghost_list.h"
#include "storage/policy/item_queue.h"
#include "storage/policy/reuse_model.h"

namespace crumb::storage {
namespace {

constexpr size_t kGhostsPerItem = 8;
constexpr size_t kEpochsPerCapacity = 8;
// Learning takes some 10 us; in a tiny tier it waits for this many insertions.
constexpr size_t kEpochInsertionsMin = 16;

// Leaves stand in queues, one per class and age; all in one queue are worth the same. The queues
// are ranked by worth once per epoch, and victims come from the first that is not empty.
class ReusePolicy final : public EvictionPolicy {
 public:
  explicit ReusePolicy(size_t capacity_items)
      : epoch_insertions_(std::max(capacity_items / kEpochsPerCapacity, kEpochInsertionsMin)),
        ghosts_(kGhostsPerItem * capacity_items) {
    for (size_t i = 0; i < kQueues; ++i) queues_.emplace_back(links_);
    std::iota(by_worth_.begin(), by_worth_.end(), 0);
    RankQueues();
  }

  std::string_view name() const override { return "default"; }

  void BeginAccess() override { ++access_; }

  ItemHandle Insert(const ItemInfo& info) override {
    if (++insertions_ % epoch_insertions_ == 0) AdvanceEpoch();
    const ItemHandle item = table_.Add(info, access_);
    states_.resize(table_.handle_end());
    State& state = states_[item];
    state = State();
    if (const std::optional<Ghost> ghost = ghosts_.Take(info.fingerprint)) {
      model_.End(ReuseModel::ClassOf(ghost->uses), ghost->epoch, ReuseModel::Ending::kUsed);
      state.uses = ghost->uses + 1;
    }
    BeginPeriod(item);
    if (info.parent != kNoItem) Dequeue(info.parent);
    Enqueue(item);
    return item;
  }

  void Link(ItemHandle child, ItemHandle parent) override {
    table_.Link(child, parent);
    Dequeue(parent);
  }

  void Hit(ItemHandle item) override {
    table_.Touch(item, access_);
    Dequeue(item);
    EndPeriod(item, ReuseModel::Ending::kUsed);
    ++states_[item].uses;
    BeginPeriod(item);
    if (table_.IsLeaf(item)) Enqueue(item);
  }

  void Remove(ItemHandle item, Removal reason) override {
    const State state = states_[item];
    const ItemHandle parent = table_[item].parent;
    Dequeue(item);
    if (reason == Removal::kDeleted) {
      EndPeriod(item, ReuseModel::Ending::kGivenUp);
    } else if (const std::optional<Ghost> dropped =
                   ghosts_.Add({.fingerprint = table_[item].fingerprint,
                                .epoch = state.epoch,
                                .uses = state.uses})) {
      model_.End(ReuseModel::ClassOf(dropped->uses), dropped->epoch, ReuseModel::Ending::kGivenUp);
    }
    table_.Remove(item);
    if (parent != kNoItem && table_.IsLeaf(parent)) EnqueueAsOldest(parent);
  }

  std::optional<ItemHandle> Victim(absl::FunctionRef<bool(ItemHandle)> is_pinned) override {
    std::optional<ItemHandle> victim = FindVictim(is_pinned);
    if (!victim && parked_.size() > 0) {
      Unpark();
      victim = FindVictim(is_pinned);
    }
    return victim;
  }

  PolicyUsage Usage() const override {
    return {.items = table_.size(),
            .ghosts = ghosts_.size(),
            .memory_bytes = table_.MemoryBytes() + links_.MemoryBytes() + ghosts_.MemoryBytes() +
                            states_.capacity() * sizeof(State) + sizeof(*this) +
                            kQueues * sizeof(ItemQueue)};
  }

 private:
  static constexpr size_t kQueues = ReuseModel::kClasses * ReuseModel::kAges;
  static constexpr uint16_t kNowhere = UINT16_MAX;
  static constexpr uint16_t kParked = kQueues;
  static_assert(kQueues < kNowhere);

  struct State {
    uint32_t uses = 0;
    uint32_t epoch = 0;         // of the last use
    uint16_t queue = kNowhere;  // index into queues_, or kParked
  };

  void BeginPeriod(ItemHandle item) {
    states_[item].epoch = model_.epoch();
    model_.Begin(ReuseModel::ClassOf(states_[item].uses));
  }

  void EndPeriod(ItemHandle item, ReuseModel::Ending ending) {
    model_.End(ReuseModel::ClassOf(states_[item].uses), states_[item].epoch, ending);
  }

  // The queues form a ring by epoch of last use, but for those of the last age, which stay put.
  uint16_t QueueFor(ItemHandle item) const {
    const State& state = states_[item];
    return QueueAt(ReuseModel::ClassOf(state.uses), model_.AgeOf(state.epoch));
  }

  uint16_t QueueAt(size_t item_class, size_t age) const {
    constexpr size_t kRing = ReuseModel::kAges - 1;
    const size_t slot = age == kRing ? kRing : (model_.epoch() + kRing - age) % kRing;
    return static_cast<uint16_t>(item_class * ReuseModel::kAges + slot);
  }

  void Enqueue(ItemHandle item) {
    const uint16_t queue = QueueFor(item);
    states_[item].queue = queue;
    queues_[queue].PushNewest(item);
    first_ = std::min(first_, place_[queue]);
  }

  // For an item whose last child left: it is at least as old as that child was.
  void EnqueueAsOldest(ItemHandle item) {
    const uint16_t queue = QueueFor(item);
    states_[item].queue = queue;
    queues_[queue].PushOldest(item);
    first_ = std::min(first_, place_[queue]);
  }

  void Dequeue(ItemHandle item) {
    uint16_t& queue = states_[item].queue;
    if (queue == kNowhere) return;
    (queue == kParked ? parked_ : queues_[queue]).Remove(item);
    queue = kNowhere;
  }

  std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned) {
    for (; first_ < kQueues; ++first_) {
      ItemQueue& queue = queues_[by_worth_[first_]];
      while (queue.oldest() != kNoItem) {
        const ItemHandle item = queue.oldest();
        if (!is_pinned(item)) return item;
        Dequeue(item);
        states_[item].queue = kParked;
        parked_.PushNewest(item);
      }
    }
    return std::nullopt;
  }

  // Pinned leaves that stood in the way wait aside for the next epoch and are then in use.
  void Unpark() {
    while (parked_.oldest() != kNoItem) {
      const ItemHandle item = parked_.oldest();
      Dequeue(item);
      EndPeriod(item, ReuseModel::Ending::kGivenUp);
      BeginPeriod(item);
      Enqueue(item);
    }
  }

  void AdvanceEpoch() {
    model_.AdvanceEpoch();
    // What was of the last but one age joins those of the last.
    for (size_t c = 0; c < ReuseModel::kClasses; ++c) {
      ItemQueue& leaving = queues_[QueueAt(c, 0)];
      while (leaving.oldest() != kNoItem) {
        const ItemHandle item = leaving.oldest();
        Dequeue(item);
        Enqueue(item);
      }
    }
    RankQueues();
    Unpark();
  }

  void RankQueues() {
    struct Cell {
      double worth;
      size_t age;
      uint16_t queue;
    };
    std::array<Cell, kQueues> cells;
    size_t n = 0;
    for (size_t c = 0; c < ReuseModel::kClasses; ++c) {
      for (size_t age = 0; age < ReuseModel::kAges; ++age) {
        cells[n++] = {model_.Worth(c, age), age, QueueAt(c, age)};
      }
    }
    std::sort(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) {
      if (a.worth != b.worth) return a.worth < b.worth;
      if (a.age != b.age) return a.age > b.age;
      return a.queue < b.queue;
    });
    for (uint16_t place = 0; place < kQueues; ++place) {
      by_worth_[place] = cells[place].queue;
      place_[cells[place].queue] = place;
    }
    first_ = 0;
  }

  const size_t epoch_insertions_;
  uint64_t insertions_ = 0;
  uint64_t access_ = 0;
  ReuseModel model_;
  ChainTable table_;
  std::vector<State> states_;  // by handle
  ItemLinks links_;
  std::deque<ItemQueue> queues_;  // by class and ring slot; leaves only
  ItemQueue parked_{links_};
  std::array<uint16_t, kQueues> by_worth_;  // queues, least worth first
  std::array<uint16_t, kQueues> place_;     // of a queue in by_worth_
  uint16_t first_ = 0;                      // queues before this place are empty
  GhostList ghosts_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeReusePolicy(size_t capacity_items) {
  return std::make_unique<ReusePolicy>(capacity_items);
}

}  // namespace crumb::storage
