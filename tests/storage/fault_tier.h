// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "storage/fragment_tier.h"

namespace crumb::storage {

// Another tier with faults on demand. Thread-safe.
class FaultTier final : public FragmentTier {
 public:
  enum class Fault {
    kNone,
    kPutFails,   // every Put: kUnavailable
    kGetFails,   // every Get: kUnavailable
    kGetFlips,   // a bit of the read bytes is inverted
    kGetShort,   // the end of the read bytes is missing
    kGetBlocks,  // Get waits until the fault is another
    kPutBlocks,  // Put waits so
  };

  explicit FaultTier(std::unique_ptr<FragmentTier> inner) : inner_(std::move(inner)) {}

  void Set(Fault fault);
  // With a keyspace, faults are those of its fragments only. Affects Get and Put, not Writable.
  void LimitTo(std::optional<KeyspaceId> keyspace);
  // Touch waits as long as this is on, whatever the fault.
  void BlockTouches(bool on);
  // The next Find calls this first.
  void OnNextFind(std::function<void()> hook) { on_find_.Set(std::move(hook)); }
  // The next Put, or Get, that succeeds calls this before it returns.
  void AfterNextPut(std::function<void()> hook) { after_put_.Set(std::move(hook)); }
  void AfterNextGet(std::function<void()> hook) { after_get_.Set(std::move(hook)); }
  FragmentTier& inner() { return *inner_; }
  int gets() const { return gets_; }
  int puts() const { return puts_; }
  // Pages of the keyspace that calls of Touch have named.
  uint64_t touched(const KeyspaceId& keyspace) const {
    MutexLock lock(&mutex_);
    const auto found = touched_.find(keyspace);
    return found == touched_.end() ? 0 : found->second;
  }

  std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) override;
  absl::Status Get(const FragmentMeta& fragment, std::span<std::byte> room) override;
  absl::Status Writable() const override;

  std::vector<FragmentMeta> Find(const KeyspaceId& keyspace, const PageKey& key) const override {
    on_find_.Call();
    return inner_->Find(keyspace, key);
  }
  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) override;
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
               TimePoint until) override {
    return inner_->Pin(keyspace, keys, until);
  }
  absl::StatusOr<uint32_t> Remove(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override {
    return inner_->Remove(keyspace, keys);
  }
  absl::StatusOr<uint64_t> Drop(const KeyspaceId& keyspace, uint64_t generation) override {
    return inner_->Drop(keyspace, generation);
  }
  uint64_t GenerationOf(const KeyspaceId& keyspace) const override {
    return inner_->GenerationOf(keyspace);
  }
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override {
    return inner_->KeyspaceBytes(keyspace);
  }
  uint64_t KeyspacePages(const KeyspaceId& keyspace) const override {
    return inner_->KeyspacePages(keyspace);
  }
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const override {
    inner_->ForEachPage(keyspace, visit);
  }
  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    return inner_->PutRecord(name, value);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const override {
    return inner_->Records();
  }
  absl::Status Sync() override { return inner_->Sync(); }
  void AddStats(StoreStats& stats) const override { inner_->AddStats(stats); }

 private:
  // A function that is called once.
  class Hook {
   public:
    void Set(std::function<void()> hook) {
      MutexLock lock(&mutex_);
      hook_ = std::move(hook);
    }
    void Call() {
      std::function<void()> hook;
      {
        MutexLock lock(&mutex_);
        hook = std::exchange(hook_, nullptr);
      }
      if (hook) hook();
    }

   private:
    Mutex mutex_;
    std::function<void()> hook_ ABSL_GUARDED_BY(mutex_);
  };

  // The fault that a call on a fragment of the keyspace meets.
  Fault FaultOf(const KeyspaceId& keyspace) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits while it is `blocking`, and returns it then.
  Fault WaitWhile(Fault blocking, const KeyspaceId& keyspace) const;

  mutable Hook on_find_;
  Hook after_put_;
  Hook after_get_;
  const std::unique_ptr<FragmentTier> inner_;
  std::atomic<int> gets_ = 0;
  std::atomic<int> puts_ = 0;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  Fault fault_ ABSL_GUARDED_BY(mutex_) = Fault::kNone;
  std::optional<KeyspaceId> limited_to_ ABSL_GUARDED_BY(mutex_);
  bool touches_block_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<KeyspaceId, uint64_t> touched_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
