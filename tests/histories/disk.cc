// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/histories/disk.h"

#include <algorithm>
#include <cstring>

#include "storage/coverage.h"
#include "tests/histories/failure.h"
#include "tests/histories/scheduler.h"

namespace crumb::histories {

using storage::FragmentMeta;
using storage::FragmentWrite;

// Fibers change only at pthread functions and in Work, so the code between two of these is one
// step, and no lock is needed.
class DiskTier final : public storage::FragmentTier {
 public:
  DiskTier(Disk& disk, storage::FragmentTierEvents events)
      : disk_(disk), events_(std::move(events)) {}

  std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) override {
    std::vector<absl::Status> statuses;
    for (const FragmentWrite& write : fragments) statuses.push_back(PutOne(write));
    Work();
    return statuses;
  }

  std::vector<FragmentMeta> Find(const KeyspaceId& keyspace, const PageKey& key) const override {
    std::vector<FragmentMeta> found;
    const auto page = disk_.pages_.find({keyspace, key});
    if (page == disk_.pages_.end()) return found;
    for (const Disk::Stored& stored : page->second.fragments) found.push_back(stored.meta);
    return found;
  }

  absl::Status Get(const FragmentMeta& fragment, std::span<std::byte> room) override {
    Work();
    if (disk_.faults.read_fails && Flip()) return absl::UnavailableError("the disk cannot read");
    const Disk::Stored* stored = FindStored(fragment);
    if (stored == nullptr) return absl::NotFoundError("no such fragment");
    // Two halves with a pause between: the slot must not be given out meanwhile.
    const std::vector<std::byte> bytes = stored->bytes;
    const size_t half = bytes.size() / 2;
    std::memcpy(room.data(), bytes.data(), half);
    Work();
    std::memcpy(room.data() + half, bytes.data() + half, bytes.size() - half);
    absl::Status status = storage::VerifyFragment(fragment, room);
    if (absl::IsDataLoss(status)) LosePage({fragment.keyspace, fragment.key});
    return status;
  }

  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) override {
    for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
      const auto page = disk_.pages_.find({keyspace, *key});
      if (page != disk_.pages_.end()) page->second.used = ++disk_.uses_;
    }
  }

  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
               TimePoint until) override {
    uint32_t found = 0;
    for (const PageKey& key : keys) {
      const auto page = disk_.pages_.find({keyspace, key});
      if (page == disk_.pages_.end()) continue;
      page->second.pinned_until = until;
      ++found;
    }
    return found;
  }

  absl::StatusOr<uint32_t> Remove(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override {
    Work();
    uint32_t removed = 0;
    std::vector<PageKey> gone;
    for (const PageKey& key : keys) {
      if (disk_.pages_.erase({keyspace, key}) == 0) continue;
      ++removed;
      gone.push_back(key);
    }
    Work();
    for (const PageKey& key : gone) events_.removed(keyspace, key);
    return removed;
  }

  absl::StatusOr<uint64_t> Drop(const KeyspaceId& keyspace, uint64_t generation) override {
    Work();
    uint64_t& now = disk_.generations_[keyspace];
    now = std::max(now, generation);
    std::vector<PageKey> gone;
    for (const auto& [name, page] : disk_.pages_) {
      const bool old = page.fragments.front().meta.generation < generation;
      if (name.first == keyspace && old) gone.push_back(name.second);
    }
    for (const PageKey& key : gone) disk_.pages_.erase({keyspace, key});
    Work();
    for (const PageKey& key : gone) events_.removed(keyspace, key);
    return gone.size();
  }

  uint64_t GenerationOf(const KeyspaceId& keyspace) const override {
    const auto found = disk_.generations_.find(keyspace);
    return found == disk_.generations_.end() ? 0 : found->second;
  }

  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override {
    uint64_t bytes = 0;
    for (const auto& [name, page] : disk_.pages_) {
      if (name.first != keyspace) continue;
      for (const Disk::Stored& stored : page.fragments) bytes += stored.meta.bytes;
    }
    return bytes;
  }

  uint64_t KeyspacePages(const KeyspaceId& keyspace) const override {
    return static_cast<uint64_t>(
        std::count_if(disk_.pages_.begin(), disk_.pages_.end(),
                      [&](const auto& page) { return page.first.first == keyspace; }));
  }

  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const override {
    std::vector<PageKey> keys;
    for (const auto& [name, page] : disk_.pages_) {
      if (name.first == keyspace) keys.push_back(name.second);
    }
    for (const PageKey& key : keys) visit(key);
  }

  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    Work();
    if (disk_.faults.records_fail && Flip()) return absl::UnavailableError("the disk is full");
    disk_.records_[name] = value;
    Work();
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const override {
    return std::vector<std::pair<std::string, std::string>>(disk_.records_.begin(),
                                                            disk_.records_.end());
  }

  absl::Status Sync() override { return Writable(); }

  absl::Status Writable() const override {
    return disk_.faults.full ? absl::UnavailableError("the disk is full") : absl::OkStatus();
  }

  void AddStats(storage::StoreStats& stats) const override {
    stats.ssd.pages = disk_.pages_.size();
    for (const auto& [name, page] : disk_.pages_) {
      for (const Disk::Stored& stored : page.fragments) {
        stats.ssd.resident_bytes += stored.meta.bytes;
      }
    }
  }

 private:
  static bool Flip() { return Scheduler::Current()->Random(2) == 0; }
  void Work() const {
    Scheduler& scheduler = *Scheduler::Current();
    const auto latency = static_cast<uint64_t>(disk_.faults.latency_us) + 1;
    scheduler.Sleep(std::chrono::microseconds(scheduler.Random(latency)));
  }

  const Disk::Stored* FindStored(const FragmentMeta& fragment) const {
    const auto page = disk_.pages_.find({fragment.keyspace, fragment.key});
    if (page == disk_.pages_.end()) return nullptr;
    const auto stored = std::find_if(page->second.fragments.begin(), page->second.fragments.end(),
                                     [&](const Disk::Stored& one) { return one.meta == fragment; });
    return stored == page->second.fragments.end() ? nullptr : &*stored;
  }

  absl::Status PutOne(const FragmentWrite& write) {
    const FragmentMeta& meta = write.meta;
    std::vector<std::byte> bytes(meta.bytes);
    const size_t half = bytes.size() / 2;
    std::memcpy(bytes.data(), write.room.data(), half);
    Work();
    std::memcpy(bytes.data() + half, write.room.data() + half, bytes.size() - half);
    if (disk_.faults.full || (disk_.faults.write_fails && Flip())) {
      return absl::UnavailableError("the disk cannot write");
    }
    if (absl::Status whole = storage::VerifyFragment(meta, bytes); !whole.ok()) {
      Fail("stable-while-written", "a fragment changed while the disk wrote it: {}",
           whole.ToString());
    }
    return Insert(meta, std::move(bytes));
  }

  absl::Status Insert(const FragmentMeta& meta, std::vector<std::byte> bytes) {
    const Disk::PageName name = {meta.keyspace, meta.key};
    if (meta.generation < GenerationOf(meta.keyspace)) return absl::AbortedError("dropped");
    if (const auto found = disk_.pages_.find(name); found != disk_.pages_.end()) {
      const uint64_t there = found->second.fragments.front().meta.generation;
      if (there > meta.generation) return absl::AbortedError("a newer generation is there");
      if (there < meta.generation) disk_.pages_.erase(found);
    }
    if (const auto found = disk_.pages_.find(name); found != disk_.pages_.end()) {
      for (const Disk::Stored& stored : found->second.fragments) {
        if (storage::Overlaps(stored.meta.range, meta.range)) {
          return absl::AlreadyExistsError("tiles of it are there");
        }
      }
    }
    while (disk_.fragments() >= disk_.fragments_max_) {
      if (!EvictOne(name)) return absl::UnavailableError("every page is pinned");
    }
    Disk::Page& page = disk_.pages_[name];
    page.used = ++disk_.uses_;
    disk_.written_.insert(name);
    page.fragments.push_back({meta, std::move(bytes)});
    return absl::OkStatus();
  }

  bool EvictOne(const Disk::PageName& keep) {
    auto oldest = disk_.pages_.end();
    const TimePoint now = Scheduler::Current()->now();
    for (auto page = disk_.pages_.begin(); page != disk_.pages_.end(); ++page) {
      if (page->first == keep || page->second.pinned_until > now) continue;
      if (oldest == disk_.pages_.end() || page->second.used < oldest->second.used) oldest = page;
    }
    if (oldest == disk_.pages_.end()) return false;
    LosePage(Disk::PageName(oldest->first));
    return true;
  }

  void LosePage(const Disk::PageName& name) {
    if (disk_.pages_.erase(name) == 0) return;
    disk_.Lose(name);
    events_.removed(name.first, name.second);
  }

  Disk& disk_;
  const storage::FragmentTierEvents events_;
};

std::unique_ptr<storage::FragmentTier> Disk::Open(storage::FragmentTierEvents events) {
  return std::make_unique<DiskTier>(*this, std::move(events));
}

bool Disk::Covers(const PageName& page, uint64_t generation, const TileRange& range) const {
  const auto found = pages_.find(page);
  if (found == pages_.end()) return false;
  std::vector<TileRange> present;
  for (const Stored& stored : found->second.fragments) {
    if (stored.meta.generation >= generation) present.push_back(stored.meta.range);
  }
  return storage::Covers(present, range);
}

bool Disk::HasSeveralSizes(const PageName& page) const {
  const auto found = pages_.find(page);
  if (found == pages_.end()) return false;
  const std::vector<Stored>& fragments = found->second.fragments;
  return std::any_of(fragments.begin(), fragments.end(), [&](const Stored& one) {
    return one.meta.bytes != fragments.front().meta.bytes;
  });
}

uint64_t Disk::losses(const PageName& page) const {
  const auto found = losses_.find(page);
  return found == losses_.end() ? 0 : found->second;
}

void Disk::Damage(uint64_t n) {
  if (pages_.empty()) return;
  const auto page = std::next(pages_.begin(), static_cast<std::ptrdiff_t>(n % pages_.size()));
  std::vector<std::byte>& bytes = page->second.fragments.front().bytes;
  // A tile names its content in the first word, which Model::CheckMemory looks for at multiples of
  // 512 bytes: one with a flipped bit could be the name of another tenant's content.
  size_t at = n % bytes.size();
  if (at % 512 < sizeof(uint64_t)) at = at + 8 < bytes.size() ? at + 8 : at - 8;
  bytes[at] ^= std::byte{16};
}

size_t Disk::fragments() const {
  size_t count = 0;
  for (const auto& [name, page] : pages_) count += page.fragments.size();
  return count;
}

}  // namespace crumb::histories
