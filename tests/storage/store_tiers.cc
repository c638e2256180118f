// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/store_tiers.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "storage/host/host_room.h"
#include "storage/host/host_tier.h"
#include "storage/store/open_tiered_store.h"
#include "storage/tiered_store.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

AcquireRequest RequestFor(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                          const TileRange& range) {
  AcquireRequest request;
  request.keyspace = keyspace;
  request.keys = {keys.begin(), keys.end()};
  request.range = range;
  request.deadline = TimePoint::max();
  return request;
}

// Finds the fragment of one page among leased ones.
absl::Status CopyOut(const FragmentMeta& wanted, std::span<const std::byte> bytes,
                     std::span<std::byte> room) {
  if (bytes.size() != wanted.bytes) return absl::NotFoundError("another fragment");
  std::memcpy(room.data(), bytes.data(), bytes.size());
  return VerifyFragment(wanted, room);
}

class HostTierFace final : public FragmentTier {
 public:
  HostTierFace(std::unique_ptr<HostState> state) : state_(std::move(state)) {}

  std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) override {
    std::vector<absl::Status> statuses;
    for (const FragmentWrite& write : fragments) statuses.push_back(PutOne(write));
    return statuses;
  }
  std::vector<FragmentMeta> Find(const KeyspaceId& keyspace, const PageKey& key) const override {
    std::vector<FragmentMeta> found;
    MutexLock lock(&state_->mutex);
    const PageHandle handle = state_->table.pages().Find(keyspace, key);
    if (handle == kNoPage) return found;
    const Page& page = state_->table[handle];
    for (const Fragment& fragment : page.fragments) {
      found.push_back(page.MetaOf(fragment));
    }
    return found;
  }
  absl::Status Get(const FragmentMeta& fragment, std::span<std::byte> room) override {
    const AcquireRequest request =
        RequestFor(fragment.keyspace, std::span(&fragment.key, 1), fragment.range);
    MissReason miss;
    std::vector<PageHandle> pages = host_.RefPrefix(request, 0, 1, &miss);
    if (pages.empty()) return absl::NotFoundError("no such page");
    const Tier tier = Tier::kHost;
    std::vector<FragmentRef> fragments;
    host_.NameFragments(request, std::span(&tier, 1), Clock::Real().Now(), &pages, &fragments);
    const absl::Status status = CopyOut(fragment, host_.Bytes(fragments[0]), room);
    host_.Unref(pages);
    return status;
  }
  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) override {
    host_.Touch(keyspace, keys);
  }
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
               TimePoint until) override {
    uint32_t pinned = 0;
    for (const PageKey& key : keys) {
      pinned += host_.Pin(keyspace, key, /*below_bytes=*/0, until).value() ? 1 : 0;
    }
    return pinned;
  }
  absl::StatusOr<uint32_t> Remove(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override {
    return static_cast<uint32_t>(host_.Remove(keyspace, keys).size());
  }
  absl::StatusOr<uint64_t> Drop(const KeyspaceId& keyspace, uint64_t generation) override {
    generations_[keyspace] = generation;
    return uint64_t{host_.Drop(keyspace, generation).size()};
  }
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override {
    return host_.KeyspaceBytes(keyspace);
  }
  uint64_t KeyspacePages(const KeyspaceId& keyspace) const override {
    uint64_t pages = 0;
    host_.ForEachPage(keyspace, [&](const PageKey&) { ++pages; });
    return pages;
  }
  uint64_t GenerationOf(const KeyspaceId& keyspace) const override {
    const auto found = generations_.find(keyspace);
    return found == generations_.end() ? 0 : found->second;
  }
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const override {
    host_.ForEachPage(keyspace, visit);
  }
  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    return records_->PutRecord(name, value);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const override {
    return records_->Records();
  }
  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status Writable() const override { return absl::OkStatus(); }
  void AddStats(StoreStats& stats) const override {
    StoreStats host;
    host_.AddStats(host);
    stats.ssd = host.host;
  }

 private:
  absl::Status PutOne(const FragmentWrite& write) {
    std::vector<Departure> none;
    const absl::StatusOr<Slot> slot =
        room_.Reserve(write.meta.keyspace, write.meta.bytes, NoneDeparts, &none);
    if (!slot.ok()) return slot.status();
    std::memcpy(room_.Memory(*slot).data(), write.room.data(), write.meta.bytes);
    const absl::StatusOr<PageHandle> page =
        host_.Publish(write.meta, *slot, Below::kRefused, /*owed=*/true);
    if (page.ok()) host_.EndWrite(*page);
    return page.status();
  }

  const std::unique_ptr<HostState> state_;
  HostTier host_{*state_};
  HostRoom room_{*state_};
  const std::unique_ptr<FragmentTier> records_ = MakeRecordsOnlyTier();
  std::map<KeyspaceId, uint64_t> generations_;
};

class StoreFace final : public FragmentTier {
 public:
  explicit StoreFace(std::unique_ptr<TieredStore> store) : store_(std::move(store)) {}

  std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) override {
    std::vector<absl::Status> statuses;
    for (const FragmentWrite& write : fragments) statuses.push_back(PutOne(write));
    // The pages used longest ago leave host memory first then, not those that were not written.
    if (fragments.size() > 1) Flush(*store_).status().IgnoreError();
    return statuses;
  }
  std::vector<FragmentMeta> Find(const KeyspaceId& keyspace, const PageKey& key) const override {
    // The store finds a page if a reader of one tile would get it.
    std::vector<FragmentMeta> found;
    for (uint16_t head = 0; head < 2; ++head) {
      AcquireRequest request = RequestFor(keyspace, std::span(&key, 1),
                                          {{0, 1}, {head, static_cast<uint16_t>(head + 1)}});
      const auto result = Acquire(*store_, request);
      if (!result.ok() || result->hit_pages == 0) continue;
      const auto bytes = store_->Bytes(result->fragments[0]);
      const auto header = DecodeFragmentHeader(bytes.subspan(result->fragments[0].tiles_bytes));
      FragmentMeta meta;
      meta.keyspace = keyspace;
      meta.key = key;
      meta.range = header->range;
      if (found.empty() || found[0].range != meta.range) found.push_back(meta);
      store_->Release(result->lease);
    }
    return found;
  }
  absl::Status Get(const FragmentMeta& fragment, std::span<std::byte> room) override {
    AcquireRequest request =
        RequestFor(fragment.keyspace, std::span(&fragment.key, 1), fragment.range);
    request.generation = fragment.generation;
    const auto result = Acquire(*store_, request);
    if (!result.ok()) return result.status();
    if (result->hit_pages == 0) return absl::NotFoundError("a miss");
    const absl::Status status = CopyOut(fragment, store_->Bytes(result->fragments[0]), room);
    store_->Release(result->lease);
    return status;
  }
  void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) override {
    const auto result = Acquire(*store_, RequestFor(keyspace, keys, {{0, 1}, {0, 1}}));
    if (result.ok()) store_->Release(result->lease);
  }
  uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
               TimePoint until) override {
    return store_->Pin(keyspace, keys, until).value();
  }
  absl::StatusOr<uint32_t> Remove(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override {
    return store_->Delete(keyspace, keys);
  }
  absl::StatusOr<uint64_t> Drop(const KeyspaceId& keyspace, uint64_t generation) override {
    generations_[keyspace] = generation;
    return store_->DropKeyspace(keyspace, generation);
  }
  uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const override {
    return store_->KeyspaceBytes(keyspace);
  }
  uint64_t KeyspacePages(const KeyspaceId& keyspace) const override {
    uint64_t pages = 0;
    ForEachPage(keyspace, [&](const PageKey&) { ++pages; });
    return pages;
  }
  uint64_t GenerationOf(const KeyspaceId& keyspace) const override {
    const auto found = generations_.find(keyspace);
    return found == generations_.end() ? 0 : found->second;
  }
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&)>& visit) const override {
    std::set<PageKey> keys;
    store_->ForEachPage(keyspace, [&](const PageKey& key, Tier) { keys.insert(key); });
    for (const PageKey& key : keys) visit(key);
  }
  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    return store_->PutRecord(name, value);
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const override {
    return store_->Records();
  }
  absl::Status Sync() override { return Flush(*store_).status(); }
  absl::Status Writable() const override { return absl::OkStatus(); }
  void AddStats(StoreStats& stats) const override { stats.ssd = store_->Stats().host; }

 private:
  absl::Status PutOne(const FragmentWrite& write) {
    const absl::StatusOr<CommitOutcome> outcome =
        store_->Commit({.header = *DecodeFragmentHeader(write.room.subspan(write.meta.tiles_bytes)),
                        .tiles = write.room.first(write.meta.tiles_bytes),
                        .logical_tile_bytes = write.meta.logical_tile_bytes});
    if (absl::IsInvalidArgument(outcome.status())) return absl::AbortedError("generation");
    if (!outcome.ok()) return outcome.status();
    return *outcome == CommitOutcome::kStored ? absl::OkStatus() : absl::AlreadyExistsError("");
  }

  const std::unique_ptr<TieredStore> store_;
  std::map<KeyspaceId, uint64_t> generations_;
};

}  // namespace

std::unique_ptr<FragmentTier> HostAsTier(uint64_t bytes, const Clock& clock) {
  HostState::Options options;
  options.host.bytes_max = ByteSize{bytes};
  options.host.policy = "lru";
  const auto ignore = [](const KeyspaceId&, const PageKey&) {};
  return std::make_unique<HostTierFace>(*HostState::Open(options, clock, {ignore, ignore}));
}

std::unique_ptr<FragmentTier> StoreAsTier(const StoreOptions& options) {
  return std::make_unique<StoreFace>(*TieredStore::Open(options, Clock::Real(), {}));
}

}  // namespace crumb::storage
