// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/policy.h"

#include <algorithm>
#include <vector>

#include "storage/policy/reuse_policy.h"
#include "storage/policy/shadow_cache.h"

namespace crumb::storage {
namespace {

constexpr size_t kShadowItems = 4000;
// Sampled items of one access that the shadows see: the first ones of its chain. The caller holds
// the tier's lock meanwhile, for some 0.5 ms.
constexpr size_t kShadowChainMax = 512;
// Factor by which the hits of the shadows fade each time as many sampled items as a shadow holds
// were requested.
constexpr double kFading = 0.9;
// An order must lead by this factor to take over, so that equals do not take turns.
constexpr double kLead = 1.003;

uint64_t Mix(uint64_t x) {  // the finalizer of SplitMix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class DefaultPolicy final : public EvictionPolicy {
 public:
  explicit DefaultPolicy(size_t capacity_items)
      : one_in_(std::max<size_t>(capacity_items / kShadowItems, 1)),
        shadow_items_(std::max<size_t>(capacity_items / one_in_, 1)),
        policy_(capacity_items),
        by_worth_(std::make_unique<ReusePolicy>(shadow_items_), shadow_items_),
        by_age_(MakeLruPolicy(), shadow_items_) {
    policy_.SetOrder(ReusePolicy::Order::kAge);  // the other order must first prove better
  }

  std::string_view name() const override { return "default"; }

  void BeginAccess() override {
    RunShadows();
    policy_.BeginAccess();
  }

  ItemHandle Insert(const ItemInfo& info) override {
    if (IsSampled(info.fingerprint)) inserts_.push_back(info.fingerprint);
    return policy_.Insert(info);
  }

  void SetHasChildren(ItemHandle item, bool has_children) override {
    policy_.SetHasChildren(item, has_children);
  }

  void Hit(ItemHandle item) override {
    const uint64_t fingerprint = policy_.FingerprintOf(item);
    if (IsSampled(fingerprint)) chain_.push_back(fingerprint);
    policy_.Hit(item);
  }

  void Remove(ItemHandle item, Removal reason) override {
    const uint64_t fingerprint = policy_.FingerprintOf(item);
    if (reason == Removal::kDeleted && IsSampled(fingerprint)) {
      by_worth_.Forget(fingerprint);
      by_age_.Forget(fingerprint);
    }
    policy_.Remove(item, reason);
  }

  std::optional<ItemHandle> FindVictim(absl::FunctionRef<bool(ItemHandle)> is_pinned,
                                       size_t& steps) override {
    return policy_.FindVictim(is_pinned, steps);
  }

  PolicyUsage Usage() const override {
    PolicyUsage usage = policy_.Usage();
    usage.memory_bytes += by_worth_.MemoryBytes() + by_age_.MemoryBytes() + sizeof(*this);
    return usage;
  }

 private:
  bool IsSampled(uint64_t fingerprint) const {
    return one_in_ == 1 || Mix(fingerprint) % one_in_ == 0;
  }

  // Lets the shadows see the access that ends now.
  void RunShadows() {
    if (chain_.empty() && inserts_.empty()) return;
    std::reverse(chain_.begin(), chain_.end());  // hits came deepest first
    chain_.insert(chain_.end(), inserts_.begin(), inserts_.end());
    if (chain_.size() > kShadowChainMax) chain_.resize(kShadowChainMax);
    hits_by_worth_ += static_cast<double>(by_worth_.Access(chain_));
    hits_by_age_ += static_cast<double>(by_age_.Access(chain_));
    requested_ += chain_.size();
    chain_.clear();
    inserts_.clear();
    if (requested_ >= shadow_items_) Choose();
  }

  void Choose() {
    requested_ = 0;
    if (hits_by_age_ > kLead * hits_by_worth_) policy_.SetOrder(ReusePolicy::Order::kAge);
    if (hits_by_worth_ > kLead * hits_by_age_) policy_.SetOrder(ReusePolicy::Order::kWorth);
    hits_by_worth_ *= kFading;
    hits_by_age_ *= kFading;
  }

  const size_t one_in_;        // items per sampled item
  const size_t shadow_items_;  // capacity of a shadow
  ReusePolicy policy_;
  ShadowCache by_worth_;
  ShadowCache by_age_;
  std::vector<uint64_t> chain_;    // sampled hits of the current access, deepest first
  std::vector<uint64_t> inserts_;  // sampled insertions of it, in their order
  double hits_by_worth_ = 0;
  double hits_by_age_ = 0;
  size_t requested_ = 0;  // sampled items that were requested since the last choice
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeDefaultPolicy(size_t capacity_items) {
  return std::make_unique<DefaultPolicy>(capacity_items);
}

}  // namespace crumb::storage
