// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "memory_client.h"

#include <algorithm>
#include <cstdlib>

#include "common/keyspace.h"
#include "kernels/tile.h"

namespace crumb::client {

namespace {

constexpr size_t kSlotAlignment = 512;
constexpr size_t kSlabAlignment = 4096;

}  // namespace

MemoryClient::MemoryClient(size_t slab_bytes) {
  auto* slab = static_cast<std::byte*>(std::aligned_alloc(kSlabAlignment, slab_bytes));
  mapped_ = std::shared_ptr<MappedMemory>(new MappedMemory, [slab](MappedMemory* mapped) {
    std::free(slab);
    delete mapped;
  });
  mapped_->slabs.emplace_back(slab, slab_bytes);
}

std::shared_ptr<std::byte> MemoryClient::NewSlot(size_t bytes) {
  const size_t rounded = (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  if (mapped_ != nullptr) {
    const std::span<const std::byte> slab = mapped_->slabs.front();
    const size_t at = slab_used_.fetch_add(rounded);
    if (at + rounded <= slab.size()) return {mapped_, const_cast<std::byte*>(slab.data()) + at};
  }
  return {static_cast<std::byte*>(std::aligned_alloc(kSlotAlignment, rounded)),
          [](std::byte* freed) { std::free(freed); }};
}

size_t MemoryClient::pages() const {
  MutexLock lock(&mutex_);
  return pages_.size();
}

std::map<PageKey, std::string> MemoryClient::contents() const {
  std::map<PageKey, std::string> contents;
  MutexLock lock(&mutex_);
  for (const auto& [key, stored] : pages_) {
    std::string text(FragmentHeaderBytes(stored.header.range.tiles()), 0);
    EncodeFragmentHeader(stored.header, std::as_writable_bytes(std::span(text)));
    text.append(reinterpret_cast<const char*>(stored.bytes.get()), stored.tiles_bytes);
    contents[key.second] = std::move(text);
  }
  return contents;
}

bool MemoryClient::Damage(const PageKey& key) {
  MutexLock lock(&mutex_);
  for (const auto& [stored_key, stored] : pages_) {
    if (stored_key.second != key) continue;
    stored.bytes.get()[stored.tiles_bytes - 5] ^= std::byte{0x10};
    return true;
  }
  return false;
}

absl::StatusOr<KeyspaceInfo> MemoryClient::OpenKeyspace(const KeyspaceSpec& spec, Duration) {
  if (!up) return absl::UnavailableError("down");
  KeyspaceDescription description;
  for (const auto& [name, value] : spec.fields) {
    const absl::Status status = description.Set(name, value);
    if (!status.ok()) return status;
  }
  const kernels::TileShape shape{
      .tokens = 64, .head_dim = spec.head_dim, .group_size = spec.group_size};
  KeyspaceInfo info;
  info.id = description.Id();
  info.generation = generation;
  info.state = StateOf(info.id);
  info.int2_tile_bytes = static_cast<uint32_t>(shape.int2_bytes());
  info.bf16_tile_bytes = static_cast<uint32_t>(shape.bf16_bytes());
  info.epoch = 1;
  const auto format = spec.fields.find("format");
  MutexLock lock(&mutex_);
  if (format != spec.fields.end() && format->second == "int2" &&
      std::find(int2_.begin(), int2_.end(), info.id) == int2_.end()) {
    int2_.push_back(info.id);
  }
  return info;
}

KeyspaceState MemoryClient::StateOf(const KeyspaceId& keyspace) {
  MutexLock lock(&mutex_);
  const auto found = states_.find(keyspace);
  return found == states_.end() ? KeyspaceState::kActive : found->second;
}

absl::Status MemoryClient::SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                            const std::string&, const std::string&) {
  MutexLock lock(&mutex_);
  states_[keyspace] = state;
  return absl::OkStatus();
}

void MemoryClient::Count(const SessionCounters& counters) {
  MutexLock lock(&mutex_);
  quality_.insert(quality_.end(), counters.quality.begin(), counters.quality.end());
}

std::vector<KeyspaceId> MemoryClient::int2_keyspaces() const {
  MutexLock lock(&mutex_);
  return int2_;
}

std::vector<QualitySample> MemoryClient::quality() const {
  MutexLock lock(&mutex_);
  return quality_;
}

std::vector<MemoryClient::Request> MemoryClient::requests() const {
  MutexLock lock(&mutex_);
  return requests_;
}

void MemoryClient::Drop() {
  MutexLock lock(&mutex_);
  ++generation;
  pages_.clear();
}

std::map<PageKey, uint64_t> MemoryClient::generations() const {
  std::map<PageKey, uint64_t> generations;
  MutexLock lock(&mutex_);
  for (const auto& [name, stored] : pages_) generations[name.second] = stored.header.generation;
  return generations;
}

void MemoryClient::Hide(const std::vector<PageKey>& keys) {
  MutexLock lock(&mutex_);
  hidden_ = {keys.begin(), keys.end()};
}

absl::StatusOr<AcquireResult> MemoryClient::Acquire(const AcquireRequest& request) {
  if (before_acquire) before_acquire(requests().size());
  if (!up) return absl::UnavailableError("down");
  AcquireResult result;
  {
    MutexLock lock(&mutex_);
    requests_.push_back({request.first_page,
                         {request.keys.begin(), request.keys.end()},
                         request.window_tokens,
                         request.behind_miss});
  }
  result.miss_reason = MissReason::kAbsent;
  if (request.behind_miss) return result;
  result.miss_reason = MissReason::kNone;
  std::vector<LeasedFragment> fragments;
  auto hold = std::make_shared<std::vector<std::shared_ptr<void>>>();
  MutexLock lock(&mutex_);
  for (const PageKey& key : request.keys) {
    const auto found = pages_.find({request.keyspace, key});
    if (found == pages_.end() || hidden_.contains(key)) {
      result.miss_reason = MissReason::kAbsent;
      break;
    }
    const Stored& stored = found->second;
    const auto sums = std::make_shared<std::vector<uint32_t>>(stored.header.tile_sums);
    fragments.push_back(
        {result.hit_pages++, stored.header, *sums, {stored.bytes.get(), stored.tiles_bytes}});
    fragments.back().header.tile_sums.clear();
    hold->push_back(stored.bytes);
    hold->push_back(sums);
    result.page_tiers.push_back(Tier::kHost);
  }
  if (result.hit_pages == 0) return result;
  leases_->fetch_add(1);
  result.lease_id = requests_.size();
  std::shared_ptr<void> lease(hold.get(), [hold, leases = leases_](void*) mutable {
    hold.reset();
    leases->fetch_sub(1);
  });
  result.lease = std::make_shared<const Lease>(std::move(fragments), std::move(lease));
  return result;
}

absl::StatusOr<std::vector<StagingSlot>> MemoryClient::Reserve(int count, size_t fragment_bytes,
                                                               const PendingPages&, Duration) {
  if (!up) return absl::UnavailableError("down");
  std::vector<StagingSlot> slots;
  for (int i = 0; i < count; ++i) {
    std::shared_ptr<std::byte> bytes = NewSlot(fragment_bytes);
    slots.emplace_back(std::span(bytes.get(), fragment_bytes), i, bytes);
  }
  return slots;
}

absl::StatusOr<std::vector<CommitOutcome>> MemoryClient::Commit(const KeyspaceId& keyspace,
                                                                std::vector<StagingSlot> slots,
                                                                size_t tiles_bytes, Duration) {
  if (!up) return absl::UnavailableError("down");
  std::vector<CommitOutcome> outcomes;
  for (const StagingSlot& slot : slots) {
    const auto header = DecodeFragmentHeader(slot.bytes().subspan(tiles_bytes));
    if (!header.ok() || !VerifyTileSums(*header, slot.bytes().first(tiles_bytes)).ok()) {
      outcomes.push_back(CommitOutcome::kRefused);
      continue;
    }
    if (header->generation != generation) {
      outcomes.push_back(CommitOutcome::kRefused);
      continue;
    }
    MutexLock lock(&mutex_);
    const bool first = pages_
                           .try_emplace({keyspace, header->key},
                                        Stored{std::static_pointer_cast<std::byte>(slot.hold()),
                                               *header, tiles_bytes})
                           .second;
    outcomes.push_back(first ? CommitOutcome::kStored : CommitOutcome::kDeduplicated);
  }
  return outcomes;
}

}  // namespace crumb::client
