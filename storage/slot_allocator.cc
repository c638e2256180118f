// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/slot_allocator.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace crumb::storage {
namespace {

// At most 3 % may be lost, and rounding fragments up to the granule takes some of that.
constexpr uint64_t kWastePerMilleMax = 20;
// Rounding up to pages may take one in so many bytes, and leaves that much less to the chunk.
constexpr uint64_t kPagePart = 64;
constexpr uint64_t kPagedWastePerMilleMax = 14;

}  // namespace

uint64_t SlotAllocator::Rounded(uint64_t bytes) const {
  const uint64_t paged = RoundUp(bytes, rounding_.page_bytes);
  if ((paged - bytes) * kPagePart <= bytes) return paged;
  return RoundUp(bytes, rounding_.granule_bytes);
}

bool SlotAllocator::FitsWell(uint64_t chunk_bytes, uint64_t slot_bytes) const {
  const bool paged =
      rounding_.page_bytes > rounding_.granule_bytes && slot_bytes % rounding_.page_bytes == 0;
  const uint64_t waste_max = paged ? kPagedWastePerMilleMax : kWastePerMilleMax;
  return chunk_bytes >= slot_bytes && chunk_bytes % slot_bytes * 1000 <= waste_max * chunk_bytes;
}

void SlotAllocator::AddRegion(uint32_t region, uint64_t bytes, uint32_t partition) {
  regions_[region] = {};
  regions_[region].partition = partition;
  GrowRegion(region, bytes);
}

void SlotAllocator::GrowRegion(uint32_t region, uint64_t bytes) {
  bytes = bytes / kChunkBytesMin * kChunkBytesMin;
  Region& grown = regions_.at(region);
  if (bytes <= grown.bytes) return;
  const uint64_t before = std::exchange(grown.bytes, bytes);
  grown.chunk_at.resize(bytes / kChunkBytesMin, kNoChunk);
  capacity_bytes_ += bytes - before;
  // The largest aligned power of two again and again; it joins a free buddy from before.
  for (uint64_t offset = before; offset < bytes;) {
    int order = kOrders - 1;
    while (offset % BytesOf(order) != 0 || offset + BytesOf(order) > bytes) --order;
    ReturnBlock({region, offset}, order);
    offset += BytesOf(order);
  }
}

bool SlotAllocator::RemoveRegion(uint32_t region) {
  const auto found = regions_.find(region);
  if (found == regions_.end() || found->second.used_bytes != 0) return false;
  CloseRegion(region);
  capacity_bytes_ -= found->second.bytes;
  regions_.erase(found);
  return true;
}

void SlotAllocator::CloseRegion(uint32_t region) {
  Region& closed = regions_.at(region);
  TenantPartition& partition = partitions_[closed.partition];
  closed.closed = true;
  for (auto& blocks : partition.free_blocks) {
    blocks.erase(blocks.lower_bound({region, 0}), blocks.upper_bound({region, UINT64_MAX}));
  }
  for (auto sizes = partition.with_room.begin(); sizes != partition.with_room.end();) {
    Rooms& rooms = sizes->second;
    LeaveEmptiest(partition, sizes->first, rooms);
    const auto leaves = [&](uint32_t id) { return chunks_[id].region == region; };
    std::erase_if(rooms.chunks, leaves);
    std::erase_if(rooms.nearly_empty, [&](const auto& chunk) { return leaves(chunk.second); });
    EnterEmptiest(partition, sizes->first, rooms);
    sizes = rooms.chunks.empty() ? partition.with_room.erase(sizes) : std::next(sizes);
  }
}

std::optional<Slot> SlotAllocator::Allocate(uint64_t bytes, uint32_t owner, uint32_t partition) {
  const uint64_t rounded = Rounded(bytes);
  if (bytes == 0 || rounded > UINT32_MAX) return std::nullopt;
  const std::optional<uint32_t> id =
      ChunkWithRoom(partitions_[partition], static_cast<uint32_t>(rounded));
  if (!id) return std::nullopt;
  return TakeSlot(*id, chunks_[*id].free.back(), owner);
}

std::optional<uint32_t> SlotAllocator::ChunkWithRoom(TenantPartition& partition,
                                                     uint32_t slot_bytes) {
  if (const auto found = partition.with_room.find(slot_bytes); found != partition.with_room.end()) {
    return *found->second.chunks.begin();
  }
  const auto open = [&](int order) -> std::optional<uint32_t> {
    const std::optional<Block> block = TakeBlock(partition, order);
    if (!block) return std::nullopt;
    return OpenChunk(*block, order, slot_bytes);
  };
  for (int order = 0; order < kOrders; ++order) {
    if (!FitsWell(BytesOf(order), slot_bytes)) continue;
    if (const auto id = open(order)) return id;
  }
  if (const auto order = LeastWastefulOrder(slot_bytes)) {
    if (const auto id = open(*order)) return id;
  }
  if (partition.chunks_of_size.contains(slot_bytes)) return std::nullopt;
  for (int order = 0; order < kOrders; ++order) {
    if (BytesOf(order) < slot_bytes) continue;
    if (const auto id = open(order)) return id;
  }
  return std::nullopt;
}

std::optional<int> SlotAllocator::LeastWastefulOrder(uint32_t slot_bytes) const {
  uint64_t largest = 0;
  for (const auto& [number, region] : regions_) {
    largest = std::max(largest, std::bit_floor(region.bytes));
  }
  std::optional<int> best;
  for (int order = 0; order < kOrders && BytesOf(order) <= largest; ++order) {
    if (BytesOf(order) < slot_bytes) continue;
    if (FitsWell(BytesOf(order), slot_bytes)) return std::nullopt;
    // Waste in a chunk of this order against that in as many bytes of the best one so far.
    if (!best || BytesOf(order) % slot_bytes <
                     (BytesOf(*best) % slot_bytes) * (BytesOf(order) / BytesOf(*best))) {
      best = order;
    }
  }
  return best;
}

std::optional<SlotAllocator::Block> SlotAllocator::TakeBlock(TenantPartition& partition,
                                                             int order) {
  auto& free_blocks = partition.free_blocks;
  int larger = order;
  while (larger < kOrders && free_blocks[larger].empty()) ++larger;
  if (larger == kOrders) return std::nullopt;
  const Block block = *free_blocks[larger].begin();
  free_blocks[larger].erase(free_blocks[larger].begin());
  while (larger > order) {
    --larger;
    free_blocks[larger].insert({block.first, block.second + BytesOf(larger)});
  }
  return block;
}

bool SlotAllocator::TakeBlockAt(Block block, int order) {
  auto& free_blocks = PartitionOf(block.first).free_blocks;
  for (int larger = order; larger < kOrders; ++larger) {
    const Block holder = {block.first, block.second / BytesOf(larger) * BytesOf(larger)};
    if (free_blocks[larger].erase(holder) == 0) continue;
    for (int half = larger - 1; half >= order; --half) {
      const uint64_t mine = block.second / BytesOf(half) * BytesOf(half);
      free_blocks[half].insert({block.first, mine ^ BytesOf(half)});
    }
    return true;
  }
  return false;
}

void SlotAllocator::ReturnBlock(Block block, int order) {
  if (regions_.at(block.first).closed) return;
  auto& free_blocks = PartitionOf(block.first).free_blocks;
  for (; order + 1 < kOrders; ++order) {
    if (free_blocks[order].erase({block.first, block.second ^ BytesOf(order)}) == 0) break;
    block.second &= ~BytesOf(order);
  }
  free_blocks[order].insert(block);
}

uint32_t SlotAllocator::OpenChunk(Block block, int order, uint32_t slot_bytes) {
  uint32_t id = static_cast<uint32_t>(chunks_.size());
  if (free_chunks_.empty()) {
    chunks_.emplace_back();
  } else {
    id = free_chunks_.back();
    free_chunks_.pop_back();
  }
  const auto slots = static_cast<uint32_t>(BytesOf(order) / slot_bytes);
  Chunk& chunk = chunks_[id];
  chunk = {.region = block.first,
           .order = static_cast<uint8_t>(order),
           .offset = block.second,
           .slot_bytes = slot_bytes,
           .used = 0,
           .owners = std::vector<uint32_t>(slots, kNoOwner),
           .free = {}};
  for (uint32_t i = slots; i > 0; --i) chunk.free.push_back(i - 1);
  auto& chunk_at = regions_[block.first].chunk_at;
  std::fill_n(chunk_at.begin() + static_cast<ptrdiff_t>(block.second / kChunkBytesMin),
              size_t{1} << order, id);
  AddRoom(id);
  ++PartitionOf(block.first).chunks_of_size[slot_bytes];
  chunk_bytes_ += BytesOf(order);
  waste_bytes_ += BytesOf(order) % slot_bytes;
  return id;
}

void SlotAllocator::CloseChunk(uint32_t id) {
  const Chunk& chunk = chunks_[id];
  auto& chunk_at = regions_[chunk.region].chunk_at;
  std::fill_n(chunk_at.begin() + static_cast<ptrdiff_t>(chunk.offset / kChunkBytesMin),
              size_t{1} << chunk.order, kNoChunk);
  RemoveRoom(id);
  TenantPartition& partition = PartitionOf(chunk.region);
  if (--partition.chunks_of_size[chunk.slot_bytes] == 0)
    partition.chunks_of_size.erase(chunk.slot_bytes);
  chunk_bytes_ -= BytesOf(chunk.order);
  waste_bytes_ -= BytesOf(chunk.order) % chunk.slot_bytes;
  ReturnBlock({chunk.region, chunk.offset}, chunk.order);
  free_chunks_.push_back(id);
}

void SlotAllocator::LeaveEmptiest(TenantPartition& partition, uint32_t slot_bytes,
                                  const Rooms& rooms) {
  if (rooms.chunks.size() < 2 || rooms.nearly_empty.empty()) return;
  partition.emptiest.erase({rooms.nearly_empty.begin()->first, slot_bytes});
}

void SlotAllocator::EnterEmptiest(TenantPartition& partition, uint32_t slot_bytes,
                                  const Rooms& rooms) {
  if (rooms.chunks.size() < 2 || rooms.nearly_empty.empty()) return;
  partition.emptiest.insert({rooms.nearly_empty.begin()->first, slot_bytes});
}

void SlotAllocator::AddRoom(uint32_t id) {
  const Chunk& chunk = chunks_[id];
  TenantPartition& partition = PartitionOf(chunk.region);
  Rooms& rooms = partition.with_room[chunk.slot_bytes];
  LeaveEmptiest(partition, chunk.slot_bytes, rooms);
  rooms.chunks.insert(id);
  rooms.nearly_empty.insert({0, id});
  EnterEmptiest(partition, chunk.slot_bytes, rooms);
}

void SlotAllocator::RemoveRoom(uint32_t id) {
  const Chunk& chunk = chunks_[id];
  TenantPartition& partition = PartitionOf(chunk.region);
  const auto found = partition.with_room.find(chunk.slot_bytes);
  if (found == partition.with_room.end()) return;
  Rooms& rooms = found->second;
  LeaveEmptiest(partition, chunk.slot_bytes, rooms);
  rooms.chunks.erase(id);
  rooms.nearly_empty.erase({0, id});
  EnterEmptiest(partition, chunk.slot_bytes, rooms);
  if (rooms.chunks.empty()) partition.with_room.erase(found);
}

void SlotAllocator::SetUsed(uint32_t id, uint32_t used) {
  Chunk& chunk = chunks_[id];
  const bool had_room = chunk.used < chunk.owners.size();
  const bool was_nearly_empty = NearlyEmpty(chunk);
  const uint32_t before = std::exchange(chunk.used, used);
  const bool has_room = used < chunk.owners.size();
  if (regions_.at(chunk.region).closed) return;
  if (had_room && has_room && !was_nearly_empty && !NearlyEmpty(chunk)) return;  // the usual case
  TenantPartition& partition = PartitionOf(chunk.region);
  Rooms& rooms = partition.with_room[chunk.slot_bytes];
  LeaveEmptiest(partition, chunk.slot_bytes, rooms);
  if (was_nearly_empty) rooms.nearly_empty.erase({before, id});
  if (!has_room) rooms.chunks.erase(id);
  if (has_room && !had_room) rooms.chunks.insert(id);
  if (has_room && NearlyEmpty(chunk)) rooms.nearly_empty.insert({used, id});
  EnterEmptiest(partition, chunk.slot_bytes, rooms);
  if (rooms.chunks.empty()) partition.with_room.erase(chunk.slot_bytes);
}

Slot SlotAllocator::TakeSlot(uint32_t id, uint32_t index, uint32_t owner) {
  Chunk& chunk = chunks_[id];
  if (chunk.free.back() != index) {
    std::iter_swap(std::find(chunk.free.begin(), chunk.free.end(), index), chunk.free.end() - 1);
  }
  chunk.free.pop_back();
  chunk.owners[index] = owner;
  SetUsed(id, chunk.used + 1);
  used_bytes_ += chunk.slot_bytes;
  regions_[chunk.region].used_bytes += chunk.slot_bytes;
  return {.region = chunk.region,
          .bytes = chunk.slot_bytes,
          .offset = chunk.offset + uint64_t{index} * chunk.slot_bytes,
          .chunk_order = chunk.order};
}

bool SlotAllocator::Claim(const Slot& slot, uint32_t owner) {
  const auto region = regions_.find(slot.region);
  if (region == regions_.end() || slot.bytes == 0 || slot.bytes % rounding_.granule_bytes != 0 ||
      slot.chunk_order >= kOrders || slot.bytes > BytesOf(slot.chunk_order)) {
    return false;
  }
  const uint64_t chunk_bytes = BytesOf(slot.chunk_order);
  const uint64_t chunk_offset = slot.offset / chunk_bytes * chunk_bytes;
  const uint64_t in_chunk = slot.offset - chunk_offset;
  // Differences, for the sums may wrap: an offset that was read from a file can be any number.
  if (chunk_bytes > region->second.bytes || chunk_offset > region->second.bytes - chunk_bytes ||
      in_chunk % slot.bytes != 0 || in_chunk > chunk_bytes - slot.bytes) {
    return false;
  }
  uint32_t id = region->second.chunk_at[chunk_offset / kChunkBytesMin];
  if (id == kNoChunk) {
    if (!TakeBlockAt({slot.region, chunk_offset}, slot.chunk_order)) return false;
    id = OpenChunk({slot.region, chunk_offset}, slot.chunk_order, slot.bytes);
  }
  const Chunk& chunk = chunks_[id];
  const auto index = static_cast<uint32_t>(in_chunk / slot.bytes);
  if (chunk.offset != chunk_offset || chunk.order != slot.chunk_order ||
      chunk.slot_bytes != slot.bytes || chunk.owners[index] != kNoOwner) {
    return false;
  }
  TakeSlot(id, index, owner);
  return true;
}

uint32_t SlotAllocator::ChunkOf(const Slot& slot) const {
  return regions_.at(slot.region).chunk_at[slot.offset / kChunkBytesMin];
}

void SlotAllocator::SetOwner(const Slot& slot, uint32_t owner) {
  Chunk& chunk = chunks_[ChunkOf(slot)];
  chunk.owners[(slot.offset - chunk.offset) / chunk.slot_bytes] = owner;
}

void SlotAllocator::Free(const Slot& slot) {
  const uint32_t id = ChunkOf(slot);
  Chunk& chunk = chunks_[id];
  const auto index = static_cast<uint32_t>((slot.offset - chunk.offset) / chunk.slot_bytes);
  chunk.owners[index] = kNoOwner;
  chunk.free.push_back(index);
  SetUsed(id, chunk.used - 1);
  used_bytes_ -= chunk.slot_bytes;
  regions_[chunk.region].used_bytes -= chunk.slot_bytes;
  if (chunk.used == 0) CloseChunk(id);
}

std::vector<uint32_t> SlotAllocator::OwnersOfNearlyEmptyChunk(uint64_t bytes,
                                                              uint32_t partition) const {
  std::vector<uint32_t> owners;
  const auto found = partitions_.find(partition);
  if (found == partitions_.end()) return owners;
  const auto& emptiest = found->second.emptiest;
  auto size = emptiest.begin();
  if (size != emptiest.end() && size->second == Rounded(bytes)) ++size;
  if (size == emptiest.end()) return owners;
  const uint32_t id = found->second.with_room.at(size->second).nearly_empty.begin()->second;
  for (const uint32_t owner : chunks_[id].owners) {
    if (owner != kNoOwner) owners.push_back(owner);
  }
  return owners;
}

bool SlotAllocator::NextOwners(uint32_t region, uint64_t& offset,
                               std::vector<uint32_t>& owners) const {
  owners.clear();
  const auto found = regions_.find(region);
  if (found == regions_.end()) return false;
  const std::vector<uint32_t>& chunk_at = found->second.chunk_at;
  size_t unit = offset / kChunkBytesMin;
  while (unit < chunk_at.size() && chunk_at[unit] == kNoChunk) ++unit;
  if (unit >= chunk_at.size()) return false;
  const Chunk& chunk = chunks_[chunk_at[unit]];
  for (const uint32_t owner : chunk.owners) {
    if (owner != kNoOwner) owners.push_back(owner);
  }
  offset = chunk.offset + BytesOf(chunk.order);
  return true;
}

std::optional<uint32_t> SlotAllocator::EmptiestRegion() const {
  const auto emptiest = std::min_element(
      regions_.begin(), regions_.end(),
      [](const auto& a, const auto& b) { return a.second.used_bytes < b.second.used_bytes; });
  if (emptiest == regions_.end()) return std::nullopt;
  return emptiest->first;
}

}  // namespace crumb::storage
