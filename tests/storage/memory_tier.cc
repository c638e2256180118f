// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/memory_tier.h"

#include <algorithm>
#include <cstring>

#include "storage/coverage.h"

namespace crumb::storage {

std::vector<absl::Status> MemoryTier::Put(std::span<const FragmentWrite> fragments) {
  std::vector<absl::Status> statuses;
  std::vector<Name> removed;
  {
    MutexLock lock(&mutex_);
    for (const FragmentWrite& write : fragments) statuses.push_back(PutOne(write, &removed));
  }
  if (events_.removed) {
    for (const Name& name : removed) events_.removed(name.first, name.second);
  }
  return statuses;
}

absl::Status MemoryTier::PutOne(const FragmentWrite& write, std::vector<Name>* removed) {
  const FragmentMeta& meta = write.meta;
  const Name name = {meta.keyspace, meta.key};
  if (meta.generation < generations_[meta.keyspace]) return absl::AbortedError("dropped");
  if (const auto found = pages_.find(name); found != pages_.end()) {
    const uint64_t there = found->second.fragments[0].meta.generation;
    if (there > meta.generation) return absl::AbortedError("newer");
    if (there < meta.generation) {
      pages_.erase(found);
    } else {
      for (const Stored& stored : found->second.fragments) {
        if (Overlaps(stored.meta.range, meta.range)) return absl::AlreadyExistsError("there");
      }
    }
  }
  while (FragmentCount() >= fragments_max_) {
    if (!EvictOne(name, removed)) return absl::UnavailableError("all pinned");
  }
  StoredPage& page = pages_[name];
  page.used = ++time_;
  page.fragments.push_back({meta, {write.room.begin(), write.room.begin() + meta.bytes}});
  return absl::OkStatus();
}

size_t MemoryTier::FragmentCount() const {
  size_t count = 0;
  for (const auto& [name, page] : pages_) count += page.fragments.size();
  return count;
}

bool MemoryTier::EvictOne(const Name& keep, std::vector<Name>* removed) {
  auto oldest = pages_.end();
  for (auto page = pages_.begin(); page != pages_.end(); ++page) {
    if (page->first == keep || page->second.pinned_until > clock_.Now()) continue;
    if (oldest == pages_.end() || page->second.used < oldest->second.used) oldest = page;
  }
  if (oldest == pages_.end()) return false;
  removed->push_back(oldest->first);
  pages_.erase(oldest);
  return true;
}

std::vector<FragmentMeta> MemoryTier::Find(const KeyspaceId& keyspace, const PageKey& key) const {
  std::vector<FragmentMeta> found;
  MutexLock lock(&mutex_);
  const auto page = pages_.find({keyspace, key});
  if (page == pages_.end()) return found;
  for (const Stored& stored : page->second.fragments) found.push_back(stored.meta);
  return found;
}

absl::Status MemoryTier::Get(const FragmentMeta& fragment, std::span<std::byte> room) {
  MutexLock lock(&mutex_);
  const auto page = pages_.find({fragment.keyspace, fragment.key});
  if (page == pages_.end()) return absl::NotFoundError("no such page");
  for (const Stored& stored : page->second.fragments) {
    if (stored.meta != fragment) continue;
    std::memcpy(room.data(), stored.bytes.data(), stored.bytes.size());
    return VerifyFragment(fragment, room);
  }
  return absl::NotFoundError("no such fragment");
}

void MemoryTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  MutexLock lock(&mutex_);
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    if (const auto page = pages_.find({keyspace, *key}); page != pages_.end()) {
      page->second.used = ++time_;
    }
  }
}

uint32_t MemoryTier::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                         TimePoint until) {
  uint32_t found = 0;
  MutexLock lock(&mutex_);
  for (const PageKey& key : keys) {
    if (const auto page = pages_.find({keyspace, key}); page != pages_.end()) {
      page->second.pinned_until = until;
      ++found;
    }
  }
  return found;
}

absl::StatusOr<uint32_t> MemoryTier::Remove(const KeyspaceId& keyspace,
                                            std::span<const PageKey> keys) {
  uint32_t removed = 0;
  {
    MutexLock lock(&mutex_);
    for (const PageKey& key : keys) removed += static_cast<uint32_t>(pages_.erase({keyspace, key}));
  }
  if (events_.removed) {
    for (const PageKey& key : keys) events_.removed(keyspace, key);
  }
  return removed;
}

absl::StatusOr<uint64_t> MemoryTier::Drop(const KeyspaceId& keyspace, uint64_t generation) {
  MutexLock lock(&mutex_);
  generations_[keyspace] = std::max(generations_[keyspace], generation);
  return uint64_t{std::erase_if(pages_, [&](const auto& page) {
    return page.first.first == keyspace && page.second.fragments[0].meta.generation < generation;
  })};
}

uint64_t MemoryTier::GenerationOf(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  const auto found = generations_.find(keyspace);
  return found == generations_.end() ? 0 : found->second;
}

uint64_t MemoryTier::KeyspacePages(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  return static_cast<uint64_t>(std::count_if(pages_.begin(), pages_.end(), [&](const auto& page) {
    return page.first.first == keyspace;
  }));
}

uint64_t MemoryTier::KeyspaceBytes(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  uint64_t bytes = 0;
  for (const auto& [name, page] : pages_) {
    if (name.first != keyspace) continue;
    for (const Stored& stored : page.fragments) bytes += stored.meta.bytes;
  }
  return bytes;
}

void MemoryTier::ForEachPage(const KeyspaceId& keyspace,
                             const std::function<void(const PageKey&)>& visit) const {
  std::vector<PageKey> keys;
  {
    MutexLock lock(&mutex_);
    for (const auto& [name, page] : pages_) {
      if (name.first == keyspace) keys.push_back(name.second);
    }
  }
  for (const PageKey& key : keys) visit(key);
}

absl::Status MemoryTier::PutRecord(const std::string& name, const std::string& value) {
  MutexLock lock(&mutex_);
  if (value.empty()) {
    records_.erase(name);
  } else {
    records_[name] = value;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> MemoryTier::Records() const {
  MutexLock lock(&mutex_);
  return std::vector<std::pair<std::string, std::string>>(records_.begin(), records_.end());
}

void MemoryTier::AddStats(StoreStats& stats) const {
  MutexLock lock(&mutex_);
  stats.ssd.pages = pages_.size();
  for (const auto& [name, page] : pages_) {
    for (const Stored& stored : page.fragments) stats.ssd.resident_bytes += stored.meta.bytes;
  }
}

}  // namespace crumb::storage
