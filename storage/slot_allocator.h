// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace crumb::storage {

// Returns the smallest multiple of `unit` that is not below `bytes`.
constexpr uint64_t RoundUp(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Room for one fragment.
struct Slot {
  uint32_t region = 0;      // slab, extent or handle of a device pool
  uint32_t bytes = 0;       // the fragment's size rounded up to the granule
  uint64_t offset = 0;      // bytes from the region's beginning
  uint8_t chunk_order = 0;  // its chunk has SlotAllocator::kChunkBytesMin << chunk_order bytes

  friend bool operator==(const Slot&, const Slot&) = default;
};

// The interface through which an index frees its slots and reads their totals. Not thread-safe.
class SlotSpace {
 public:
  virtual ~SlotSpace() = default;

  // Records the owner of a slot that is in use.
  virtual void SetOwner(const Slot& slot, uint32_t owner) = 0;
  virtual void Free(const Slot& slot) = 0;

  virtual uint64_t capacity_bytes() const = 0;
  virtual uint64_t used_bytes() const = 0;  // sum over slots in use
  // Returns the bytes at the ends of chunks or handles that are too few for a slot.
  virtual uint64_t waste_bytes() const = 0;
};

// Cuts regions of memory or disk into slots. A region is divided into chunks, powers of two of
// kChunkBytesMin that split and join like buddies; a chunk is cut into slots of one size and goes
// back when its last slot is freed. The chunk size is the smallest that loses at most 2 % at its
// end to the slot size; only the first chunk of a size may be a worse one, so that a small store
// can hold many sizes, and where all regions are too small for a good one, the best there is. A
// region is of one partition, and each partition is cut as if it were alone. Slots are rounded up
// to whole pages where that and the chunk's end together lose at most 3 %. Keeps addresses only,
// touches no bytes. Not thread-safe.
class SlotAllocator final : public SlotSpace {
 public:
  static constexpr uint64_t kChunkBytesMin = uint64_t{1} << 20;
  static constexpr uint32_t kNoOwner = UINT32_MAX;

  struct Rounding {
    uint32_t granule_bytes = 512;  // slots begin at and fill multiples of it, a power of two
    // Slots are multiples of this instead, if that wastes at most 3 %. A power of two, at least
    // granule_bytes.
    uint32_t page_bytes = 512;
  };
  explicit SlotAllocator(const Rounding& rounding) : rounding_(rounding) {}

  // Adds `bytes`, rounded down to chunks, as region number `region`, which must be new.
  void AddRegion(uint32_t region, uint64_t bytes, uint32_t partition = 0);
  // Makes a region larger, to `bytes` rounded down to chunks; it never shrinks.
  void GrowRegion(uint32_t region, uint64_t bytes);
  // Removes a region. Returns false, and does not, if slots of it are in use.
  bool RemoveRegion(uint32_t region);
  // Allocates no more slots in a region until it is removed.
  void CloseRegion(uint32_t region);

  // Allocates a slot for `bytes` in the partition's regions and records its owner. Returns none if
  // the partition has no room for that size.
  std::optional<Slot> Allocate(uint64_t bytes, uint32_t owner, uint32_t partition = 0);
  // Allocates exactly this slot, which an earlier process had. Returns false if it overlaps a used
  // slot or does not fit a chunk.
  bool Claim(const Slot& slot, uint32_t owner);
  void SetOwner(const Slot& slot, uint32_t owner) override;
  void Free(const Slot& slot) override;

  // Returns the owners of the slots in the emptiest chunk that is at most an eighth full and whose
  // slots are too small or too large for `bytes`. The chunk is free for that size after they have
  // moved. Empty if there is no such chunk. A chunk that alone has room for its own size is left
  // out, because it may have just begun to fill. Costs O(log chunks) plus the slots of that chunk.
  std::vector<uint32_t> OwnersOfNearlyEmptyChunk(uint64_t bytes, uint32_t partition = 0) const;
  // Reads the owners of a region chunk by chunk: fills `owners` with those of the first chunk at or
  // behind `offset`, some more than once if they have several slots there, and moves `offset`
  // behind that chunk. Returns false if there is no further chunk. O(slots of the chunk), which are
  // at most kChunkBytesMin / Rounding::granule_bytes for the smallest slots.
  bool NextOwners(uint32_t region, uint64_t& offset, std::vector<uint32_t>& owners) const;
  uint64_t used_bytes(uint32_t region) const { return regions_.at(region).used_bytes; }
  // Returns the region with the fewest bytes in use.
  std::optional<uint32_t> EmptiestRegion() const;

  uint64_t capacity_bytes() const override { return capacity_bytes_; }
  uint64_t used_bytes() const override { return used_bytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }  // sum over chunks in use
  uint64_t waste_bytes() const override { return waste_bytes_; }

 private:
  struct Region {
    uint64_t bytes = 0;
    uint64_t used_bytes = 0;
    uint32_t partition = 0;
    bool closed = false;
    std::vector<uint32_t> chunk_at;  // the chunk of each kChunkBytesMin unit, or kNoChunk
  };
  struct Chunk {
    uint32_t region = 0;
    uint8_t order = 0;
    uint64_t offset = 0;
    uint32_t slot_bytes = 0;
    uint32_t used = 0;
    std::vector<uint32_t> owners;  // the owner of each slot, or kNoOwner
    std::vector<uint32_t> free;    // slots that are free
  };
  using Block = std::pair<uint32_t, uint64_t>;  // region, offset

  static constexpr uint32_t kNoChunk = UINT32_MAX;
  static constexpr int kOrders = 32;

  // Chunks of one slot size that have a free slot.
  struct Rooms {
    std::set<uint32_t> chunks;
    std::set<std::pair<uint32_t, uint32_t>> nearly_empty;  // slots in use, chunk
  };
  // Free room in the regions of one partition.
  struct TenantPartition {
    std::set<Block> free_blocks[kOrders];
    std::map<uint32_t, Rooms> with_room;  // keyed by slot size; every entry has chunks
    std::map<uint32_t, uint32_t> chunks_of_size;
    // The emptiest of the nearly empty chunks of each size in which more than one chunk has room:
    // slots in use, slot size.
    std::set<std::pair<uint32_t, uint32_t>> emptiest;
  };

  static uint64_t BytesOf(int order) { return kChunkBytesMin << order; }
  uint64_t Rounded(uint64_t bytes) const;
  // Whether a chunk of `chunk_bytes` loses little enough behind its last slot.
  bool FitsWell(uint64_t chunk_bytes, uint64_t slot_bytes) const;
  TenantPartition& PartitionOf(uint32_t region) {
    return partitions_[regions_.at(region).partition];
  }
  std::optional<uint32_t> ChunkWithRoom(TenantPartition& partition, uint32_t slot_bytes);
  // Returns the chunk size that wastes least, if no region is large enough for one that wastes at
  // most 2 %.
  std::optional<int> LeastWastefulOrder(uint32_t slot_bytes) const;
  static std::optional<Block> TakeBlock(TenantPartition& partition, int order);
  bool TakeBlockAt(Block block, int order);
  void ReturnBlock(Block block, int order);
  uint32_t OpenChunk(Block block, int order, uint32_t slot_bytes);
  void CloseChunk(uint32_t id);
  static bool NearlyEmpty(const Chunk& chunk) {
    return uint64_t{chunk.used} * 8 <= chunk.owners.size();
  }
  // Changes how many slots of a chunk are in use, and its entries in its partition.
  void SetUsed(uint32_t id, uint32_t used);
  // Adds or removes a chunk without used slots among those that have room.
  void AddRoom(uint32_t id);
  void RemoveRoom(uint32_t id);
  // LeaveEmptiest is called before, and EnterEmptiest after, every change of `rooms`.
  static void LeaveEmptiest(TenantPartition& partition, uint32_t slot_bytes, const Rooms& rooms);
  static void EnterEmptiest(TenantPartition& partition, uint32_t slot_bytes, const Rooms& rooms);
  uint32_t ChunkOf(const Slot& slot) const;
  Slot TakeSlot(uint32_t id, uint32_t index, uint32_t owner);

  const Rounding rounding_;
  std::map<uint32_t, Region> regions_;
  std::map<uint32_t, TenantPartition> partitions_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> free_chunks_;  // unused entries of chunks_
  uint64_t capacity_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  uint64_t chunk_bytes_ = 0;
  uint64_t waste_bytes_ = 0;
};

}  // namespace crumb::storage
