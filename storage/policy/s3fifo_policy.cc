// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/policy.h"

#include <algorithm>

#include "storage/policy/chain_table.h"
#include "storage/policy/chunked_vector.h"
#include "storage/policy/ghost_list.h"
#include "storage/policy/item_queue.h"

namespace crumb::storage {
namespace {

constexpr size_t kSmallQueueFraction = 10;  // the small queue holds one item in ten
constexpr uint8_t kUsesMax = 3;
constexpr uint8_t kUsesToStay = 2;  // uses that move an item from the small to the main queue
// The original remembers as many as the main queue holds; chains of pages come back later.
constexpr size_t kGhostsPerItem = 4;

class S3FifoPolicy final : public EvictionPolicy {
 public:
  explicit S3FifoPolicy(size_t capacity_items) : ghosts_(kGhostsPerItem * capacity_items) {}

  std::string_view name() const override { return "s3fifo"; }

  void BeginAccess() override { ++access_; }

  ItemHandle Insert(const ItemInfo& info) override {
    const ItemHandle item = table_.Add(info, access_);
    states_.GrowTo(table_.handle_end());
    states_[item] = State();
    states_[item].in_main = ghosts_.Take(info.fingerprint).has_value();
    const bool behind_parent = info.parent != kNoItem &&
                               table_[info.parent].last_access == access_ &&
                               states_[info.parent].in_main == states_[item].in_main;
    if (behind_parent) {
      QueueOf(item).PushBehind(item, info.parent);
    } else {
      QueueOf(item).PushNewest(item);
    }
    return item;
  }

  void SetHasChildren(ItemHandle item, bool has_children) override {
    table_.SetHasChildren(item, has_children);
    // A parent that was passed over for its children's sake is as old as the last of them.
    if (has_children || !states_[item].passed_over) return;
    Unlink(item);
    QueueOf(item).PushOldest(item);
    states_[item].passed_over = false;
  }

  void Hit(ItemHandle item) override {
    uint8_t& uses = states_[item].uses;
    uses = std::min<uint8_t>(uses + 1, kUsesMax);
  }

  void Remove(ItemHandle item, Removal reason) override {
    if (reason == Removal::kEvicted && !states_[item].in_main) {
      ghosts_.Add({.fingerprint = table_[item].fingerprint, .epoch = 0, .uses = 0});
    }
    Unlink(item);
    table_.Remove(item);
  }

  std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                       size_t& steps) override {
    // A search that goes on may have passed items before they could leave: only one that begins in
    // this call can say that there is no victim.
    const bool goes_on = search_.tried > 0;
    std::optional<ItemHandle> victim = GoOn(is_pinned, steps);
    if (!victim && steps > 0 && goes_on) victim = GoOn(is_pinned, steps);
    return victim;
  }

  PolicyUsage Usage() const override {
    return {.items = table_.size(),
            .ghosts = ghosts_.size(),
            .memory_bytes = table_.MemoryBytes() + links_.MemoryBytes() + ghosts_.MemoryBytes() +
                            states_.MemoryBytes()};
  }

 private:
  struct State {
    uint8_t uses = 0;  // hits since it was queued
    bool in_main = false;
    bool passed_over = false;  // was oldest while it had children
  };

  // A search for a victim, which goes on in the next call when its steps are used up: first the
  // queues in their order, then every item of the small queue and of the main one.
  struct Search {
    size_t tried = 0;
    bool in_main = false;
    bool begun = false;  // the search has begun; `next` is its next item, kNoItem behind the last
    ItemHandle next = kNoItem;
  };

  ItemQueue& QueueOf(ItemHandle item) { return states_[item].in_main ? main_ : small_; }

  bool SmallIsNext() const {
    return main_.size() == 0 ||
           (small_.size() > 0 && small_.size() * kSmallQueueFraction >= table_.size());
  }

  void MoveToMain(ItemHandle item) {
    Unlink(item);
    states_[item].in_main = true;
    states_[item].uses = 0;
    main_.PushNewest(item);
  }

  void GiveAnotherRound(ItemHandle item) {
    Unlink(item);
    QueueOf(item).PushNewest(item);
  }

  // Takes an item out of its queue; a search that comes to it next goes on behind it.
  void Unlink(ItemHandle item) {
    ItemQueue& queue = QueueOf(item);
    if (search_.next == item) search_.next = queue.NewerThan(item);
    queue.Remove(item);
  }

  // The search from where it stands to a victim, to the end, or until its steps are used up.
  std::optional<ItemHandle> GoOn(absl::FunctionRef<bool(ItemHandle)> is_pinned, size_t& steps) {
    // Every item is seen at most once per round it can be given, and once more in the main queue.
    const size_t tries_max = (kUsesMax + 2) * table_.size();
    // `blocked_`: the queue to take from has a parent or pinned item at its end.
    for (; search_.tried < tries_max; ++search_.tried) {
      if (steps == 0) return std::nullopt;
      --steps;
      const bool from_small = SmallIsNext() != blocked_ && small_.size() > 0;
      const ItemHandle item = from_small || main_.size() == 0 ? small_.oldest() : main_.oldest();
      State& state = states_[item];
      blocked_ = false;
      if (!state.in_main && state.uses >= kUsesToStay) {
        MoveToMain(item);
      } else if (state.in_main && state.uses > 0) {
        --state.uses;
        GiveAnotherRound(item);
      } else if (!table_.IsLeaf(item)) {
        // It stays for its children's sake, and is on probation no longer.
        state.passed_over = true;
        blocked_ = true;
        MoveToMain(item);
      } else if (is_pinned(item)) {
        blocked_ = true;
        GiveAnotherRound(item);
      } else {
        search_ = Search();
        return item;
      }
    }
    return AnyUnpinnedLeaf(is_pinned, steps);
  }

  // Pinned items and parents can keep one queue at its fraction while the other has a victim.
  std::optional<ItemHandle> AnyUnpinnedLeaf(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                            size_t& steps) {
    while (true) {
      const ItemQueue& queue = search_.in_main ? main_ : small_;
      if (!search_.begun) search_.next = queue.oldest();
      search_.begun = true;
      while (search_.next != kNoItem) {
        if (steps == 0) return std::nullopt;
        --steps;
        const ItemHandle item = search_.next;
        search_.next = queue.NewerThan(item);
        if (table_.IsLeaf(item) && !is_pinned(item)) {
          search_ = Search();
          return item;
        }
      }
      search_.begun = false;
      search_.in_main = !search_.in_main;
      if (!search_.in_main) break;
    }
    search_ = Search();
    return std::nullopt;
  }

  uint64_t access_ = 0;
  ChainTable table_;
  ItemLinks links_;
  ItemQueue small_{links_};
  ItemQueue main_{links_};
  ChunkedVector<State> states_;  // indexed by handle
  // The search for a victim, kept from one call to the next.
  bool blocked_ = false;
  Search search_;
  GhostList ghosts_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeS3FifoPolicy(size_t capacity_items) {
  return std::make_unique<S3FifoPolicy>(capacity_items);
}

}  // namespace crumb::storage
