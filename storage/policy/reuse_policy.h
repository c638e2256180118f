// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "storage/policy/chain_table.h"
#include "storage/policy/chunked_vector.h"
#include "storage/policy/ghost_list.h"
#include "storage/policy/item_queue.h"
#include "storage/policy/policy.h"
#include "storage/policy/reuse_model.h"

namespace crumb::storage {

// The leaf that is worth least according to a ReuseModel goes first; among equals, the one not used
// for longest. An epoch of the model is an eighth of `capacity_items` insertions. Remembers eight
// times `capacity_items` evicted items, so that an item that comes back is known.
//
// Leaves stand in queues, one per class and age; all in one queue are worth the same. The queues
// are ranked once per epoch, and victims come from the first that is not empty.
class ReusePolicy final : public EvictionPolicy {
 public:
  enum class Order {
    kWorth,
    kAge,  // sorts by the epoch of the last use alone
  };

  explicit ReusePolicy(size_t capacity_items);

  // Takes effect at once. kWorth at first.
  void SetOrder(Order order);

  uint64_t FingerprintOf(ItemHandle item) const { return table_[item].fingerprint; }

  std::string_view name() const override { return "reuse"; }
  void BeginAccess() override { ++access_; }
  ItemHandle Insert(const ItemInfo& info) override;
  void SetHasChildren(ItemHandle item, bool has_children) override;
  void Hit(ItemHandle item) override;
  void Remove(ItemHandle item, Removal reason) override;
  std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                       size_t& steps) override;
  PolicyUsage Usage() const override;

 private:
  static constexpr size_t kQueues = ReuseModel::kClasses * ReuseModel::kAges;
  static_assert(kQueues <= UINT16_MAX);

  enum class Where : uint8_t {
    kNowhere,  // it has children
    kQueued,   // the queue of its class and age has it
    kParked,   // pinned when it was met in its queue
  };

  struct State {
    uint32_t uses = 0;
    uint32_t epoch = 0;  // epoch of the last use
    Where where = Where::kNowhere;
  };

  // A period is the time between two uses of an item, as the model counts them.
  void BeginPeriod(ItemHandle item);
  void EndPeriod(ItemHandle item, ReuseModel::Ending ending);

  uint16_t QueueAt(size_t item_class, size_t age) const;
  uint16_t QueueFor(ItemHandle item) const;
  enum class End { kNewest, kOldest };
  void Enqueue(ItemHandle item, End end);
  void Dequeue(ItemHandle item);

  std::optional<ItemHandle> SearchQueues(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                         size_t& steps);
  void Unpark(size_t count);
  void AdvanceEpoch();
  void RankQueues();

  const size_t epoch_insertions_;
  uint64_t insertions_ = 0;
  uint64_t access_ = 0;
  Order order_ = Order::kWorth;
  ReuseModel model_;
  ChainTable table_;
  ChunkedVector<State> states_;  // indexed by handle
  ItemLinks links_;
  std::deque<ItemQueue> queues_;             // leaves, indexed by class and ring slot
  ItemQueue parked_{links_};                 // pinned leaves that stood in the way
  size_t to_unpark_ = 0;                     // items that were parked before this epoch
  std::array<uint16_t, kQueues> ranking_{};  // queues, first to be emptied first
  std::array<uint16_t, kQueues> place_{};    // index of each queue in ranking_
  uint16_t first_ = 0;                       // queues before this place are empty
  GhostList ghosts_;
};

}  // namespace crumb::storage
