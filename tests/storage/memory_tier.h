// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "storage/fragment_tier.h"

namespace crumb::storage {

// A tier in ordinary memory, as simple as can be: the least recently used page goes first, whole.
// Thread-safe.
class MemoryTier final : public FragmentTier {
 public:
  MemoryTier(size_t fragments_max, const Clock& clock, FragmentTierEvents events)
      : fragments_max_(fragments_max), clock_(clock), events_(std::move(events)) {}

  std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) override;
  std::vector<FragmentMeta> Find(const KeyspaceId& keyspace, const PageKey& key) const override;
  absl::Status Get(const FragmentMeta& fragment, std::span<std::byte> room) override;
  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) override;
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys, TimePoint until) override;
  absl::StatusOr<uint32_t> Remove(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override;
  absl::StatusOr<uint64_t> Drop(const KeyspaceId& keyspace, uint64_t generation) override;
  uint64_t GenerationOf(const KeyspaceId& keyspace) const override;
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override;
  uint64_t KeyspacePages(const KeyspaceId& keyspace) const override;
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const override;
  absl::Status PutRecord(const std::string& name, const std::string& value) override;
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const override;
  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status Writable() const override { return absl::OkStatus(); }
  void AddStats(StoreStats& stats) const override;

 private:
  using Name = std::pair<KeyspaceId, PageKey>;
  struct Stored {
    FragmentMeta meta;
    std::vector<std::byte> bytes;
  };
  struct StoredPage {
    std::vector<Stored> fragments;
    uint64_t used = 0;
    TimePoint pinned_until;
  };

  absl::Status PutOne(const FragmentWrite& write, std::vector<Name>* removed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EvictOne(const Name& keep, std::vector<Name>* removed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t FragmentCount() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t fragments_max_;
  const Clock& clock_;
  const FragmentTierEvents events_;
  mutable Mutex mutex_;
  std::map<Name, StoredPage> pages_ ABSL_GUARDED_BY(mutex_);
  std::map<KeyspaceId, uint64_t> generations_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> records_ ABSL_GUARDED_BY(mutex_);
  uint64_t time_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::storage
