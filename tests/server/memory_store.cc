// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/memory_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/fragment_header.h"
#include "common/status_macros.h"

namespace crumb::server {

MemoryStore::MemoryStore(size_t slots, size_t slot_bytes, storage::StoreEvents events,
                         std::shared_ptr<RecordMap> records)
    : slots_(slots),
      slot_bytes_(slot_bytes),
      events_(std::move(events)),
      records_(std::move(records)),
      fd_(CreateMemfd("memory-store", slots * slot_bytes).value()),
      mapping_(Mapping::Of(fd_.get(), slots * slot_bytes, Mapping::Access::kReadWrite).value()) {}

const MemoryStore::Page* MemoryStore::FindLocked(const KeyspaceId& keyspace,
                                                 const PageKey& key) const {
  const auto found = pages_.find({keyspace, key});
  return found == pages_.end() ? nullptr : &found->second;
}

absl::StatusOr<CommitOutcome> MemoryStore::Commit(const storage::CommitRequest& request) {
  const FragmentHeader& header = request.header;
  const size_t header_bytes = FragmentHeaderBytes(header.range.tiles());
  if (request.tiles.size() + header_bytes > slot_bytes_) {
    return absl::InvalidArgumentError("too large");
  }
  std::vector<std::byte> copy(request.tiles.begin(), request.tiles.end());
  CRUMB_RETURN_IF_ERROR(VerifyTileSums(header, copy));
  copy.resize(copy.size() + header_bytes);
  EncodeFragmentHeader(header, std::span(copy).last(header_bytes));
  {
    MutexLock lock(&mutex_);
    const auto least = generations_.find(header.keyspace);
    if (least != generations_.end() && header.generation < least->second) {
      return absl::InvalidArgumentError("the generation was dropped");
    }
    if (FindLocked(header.keyspace, header.key) != nullptr) return CommitOutcome::kDeduplicated;
    if (slot_sizes_.size() == slots_) return absl::ResourceExhaustedError("full");
    const size_t slot = slot_sizes_.size();
    slot_sizes_.push_back(copy.size());
    std::memcpy(mapping_.data() + slot * slot_bytes_, copy.data(), copy.size());
    pages_[{header.keyspace, header.key}] = {
        .generation = header.generation,
        .slot = slot,
        .tiles_bytes = static_cast<uint32_t>(request.tiles.size()),
        .bytes = copy.size(),
        .parent = header.parent};
    not_durable_.emplace_back(header.keyspace, header.key);
  }
  if (events_.page) {
    events_.page({storage::PageEvent::Kind::kAdded, header.keyspace, header.key, Tier::kHost});
  }
  return CommitOutcome::kStored;
}

namespace {

class VectorSlot : public storage::IncomingSlot {
 public:
  explicit VectorSlot(uint64_t bytes) : bytes_(bytes) {}
  std::span<std::byte> memory() override { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<storage::IncomingSlot>> MemoryStore::ReserveIncoming(
    const KeyspaceId&, uint64_t bytes) {
  MutexLock lock(&mutex_);
  if (slot_sizes_.size() == slots_) return absl::ResourceExhaustedError("full");
  return std::make_shared<VectorSlot>(bytes);
}

absl::StatusOr<CommitOutcome> MemoryStore::PublishIncoming(
    const std::shared_ptr<storage::IncomingSlot>& slot, const FragmentHeader& header, uint32_t,
    storage::Received) {
  const size_t tiles_bytes = FragmentTilesBytes(header.range.tiles(), header.tile_bytes);
  return Commit(
      {.header = header, .tiles = std::span<const std::byte>(slot->memory()).first(tiles_bytes)});
}

std::optional<PageKey> MemoryStore::ParentOf(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&mutex_);
  const Page* page = FindLocked(keyspace, key);
  if (page == nullptr) return std::nullopt;
  return page->parent;
}

storage::AcquireResult MemoryStore::AcquireLocked(const storage::AcquireRequest& request) {
  storage::AcquireResult result;
  for (const PageKey& key : request.keys) {
    const Page* page = FindLocked(request.keyspace, key);
    if (page == nullptr || page->generation < request.generation) {
      result.miss_reason = page == nullptr ? MissReason::kAbsent : MissReason::kGeneration;
      break;
    }
    result.fragments.push_back({result.hit_pages, 0, page->slot * slot_bytes_, page->tiles_bytes});
    result.page_tiers.push_back(tier_);
    ++result.hit_pages;
  }
  if (result.hit_pages > 0) leases_[result.lease = ++last_lease_] = result;
  return result;
}

void MemoryStore::Acquire(storage::AcquireRequest request,
                          std::function<void(absl::StatusOr<storage::AcquireResult>)> done) {
  storage::AcquireResult result;
  {
    MutexLock lock(&mutex_);
    if (hold_) {
      held_.emplace_back(std::move(request), std::move(done));
      return;
    }
    result = AcquireLocked(request);
  }
  done(std::move(result));
}

void MemoryStore::ReportTier(Tier tier) {
  MutexLock lock(&mutex_);
  tier_ = tier;
}

void MemoryStore::HoldAcquires() {
  MutexLock lock(&mutex_);
  hold_ = true;
}

void MemoryStore::RespondHeld() {
  std::vector<Held> held;
  {
    MutexLock lock(&mutex_);
    hold_ = false;
    held.swap(held_);
  }
  for (auto& [request, done] : held) Acquire(std::move(request), std::move(done));
}

storage::LookupResult MemoryStore::Lookup(const storage::AcquireRequest& request) {
  MutexLock lock(&mutex_);
  storage::AcquireResult found = AcquireLocked(request);
  leases_.erase(found.lease);
  return {found.hit_pages, found.page_tiers, found.miss_reason};
}

bool MemoryStore::Release(storage::LeaseId lease) {
  MutexLock lock(&mutex_);
  return leases_.erase(lease) > 0;
}

std::optional<storage::LeasedPages> MemoryStore::ReadLease(storage::LeaseId lease,
                                                           const TileRange&) const {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return std::nullopt;
  return storage::LeasedPages{found->second.hit_pages, found->second.fragments};
}

std::span<const std::byte> MemoryStore::Bytes(const storage::FragmentRef& fragment) const {
  MutexLock lock(&mutex_);
  return mapping_.bytes().subspan(fragment.offset, slot_sizes_[fragment.offset / slot_bytes_]);
}

void MemoryStore::Flush(const storage::FlushScope& scope, std::optional<uint64_t>,
                        std::function<void(const FlushReport&)> done) {
  flush_scope_ = scope;
  std::vector<Name> durable;
  FlushReport report;
  {
    MutexLock lock(&mutex_);
    durable.swap(not_durable_);
    report.durable_pages = pages_.size();
  }
  for (const auto& [keyspace, key] : durable) {
    if (events_.durable) events_.durable(keyspace, key);
  }
  done(report);
}

storage::Durability MemoryStore::DurabilityOf(const KeyspaceId& keyspace, const PageKey& key,
                                              uint64_t, const TileRange&) const {
  MutexLock lock(&mutex_);
  if (FindLocked(keyspace, key) == nullptr) return storage::Durability::kNone;
  const Name name = {keyspace, key};
  const bool pending =
      std::find(not_durable_.begin(), not_durable_.end(), name) != not_durable_.end();
  return pending ? storage::Durability::kPending : storage::Durability::kDurable;
}

absl::StatusOr<uint32_t> MemoryStore::Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                          TimePoint) {
  return Unpin(keyspace, keys);
}

uint32_t MemoryStore::Unpin(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  MutexLock lock(&mutex_);
  uint32_t found = 0;
  for (const PageKey& key : keys) found += FindLocked(keyspace, key) != nullptr ? 1 : 0;
  return found;
}

absl::StatusOr<uint32_t> MemoryStore::Delete(const KeyspaceId& keyspace,
                                             std::span<const PageKey> keys) {
  uint32_t deleted = 0;
  for (const PageKey& key : keys) {
    {
      MutexLock lock(&mutex_);
      if (FindLocked(keyspace, key) == nullptr) continue;
      pages_.erase({keyspace, key});
    }
    ++deleted;
    if (events_.page) {
      events_.page({storage::PageEvent::Kind::kRemoved, keyspace, key, Tier::kHost});
    }
  }
  return deleted;
}

absl::StatusOr<uint64_t> MemoryStore::DropKeyspace(const KeyspaceId& keyspace,
                                                   uint64_t generation) {
  std::vector<PageKey> dropped;
  {
    MutexLock lock(&mutex_);
    uint64_t& least = generations_[keyspace];
    least = std::max(least, generation);
    std::erase_if(pages_, [&](const auto& entry) {
      const bool older = entry.first.first == keyspace && entry.second.generation < generation;
      if (older) dropped.push_back(entry.first.second);
      return older;
    });
  }
  for (const PageKey& key : dropped) {
    if (!events_.page) break;
    events_.page({storage::PageEvent::Kind::kRemoved, keyspace, key, Tier::kHost});
  }
  return dropped.size();
}

absl::Status MemoryStore::PutRecord(const std::string& name, const std::string& value) {
  MutexLock lock(&mutex_);
  if (value.empty()) {
    records_->erase(name);
  } else {
    (*records_)[name] = value;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> MemoryStore::Records() {
  MutexLock lock(&mutex_);
  return std::vector<std::pair<std::string, std::string>>(records_->begin(), records_->end());
}

uint64_t MemoryStore::PageBytes(const KeyspaceId& keyspace, const PageKey& key) const {
  MutexLock lock(&mutex_);
  const Page* const page = FindLocked(keyspace, key);
  return page == nullptr ? 0 : page->bytes;
}

uint64_t MemoryStore::KeyspaceBytes(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  uint64_t bytes = 0;
  for (const auto& [name, page] : pages_) {
    if (name.first == keyspace) bytes += page.bytes;
  }
  return bytes;
}

void MemoryStore::ForEachPage(const KeyspaceId& keyspace,
                              const std::function<void(const PageKey&, Tier)>& visit) {
  MutexLock lock(&mutex_);
  for (const auto& [name, page] : pages_) {
    if (name.first == keyspace) visit(name.second, Tier::kHost);
  }
}

std::vector<storage::Slab> MemoryStore::slabs() const { return {{fd_.get(), mapping_.size()}}; }

storage::StoreStats MemoryStore::Stats() const {
  MutexLock lock(&mutex_);
  storage::StoreStats stats;
  stats.host.pages = pages_.size();
  stats.host.capacity_bytes = mapping_.size();
  stats.leases = leases_.size();
  return stats;
}

}  // namespace crumb::server
