// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/slot_allocator.h"

#include <algorithm>
#include <map>
#include <random>

#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr SlotAllocator::Rounding kGranules = {.granule_bytes = 512, .page_bytes = 512};
constexpr SlotAllocator::Rounding kPages = {.granule_bytes = 512, .page_bytes = 4096};

// Checks the slots that are out: inside their region, aligned, and apart.
class Model {
 public:
  void Add(const Slot& slot, uint64_t region_bytes) {
    ASSERT_LE(slot.offset + slot.bytes, region_bytes);
    ASSERT_EQ(slot.offset % 512, 0u);
    const auto next = slots_.lower_bound({slot.region, slot.offset});
    if (next != slots_.end() && next->first.first == slot.region) {
      ASSERT_LE(slot.offset + slot.bytes, next->second.offset);
    }
    if (next != slots_.begin()) {
      const Slot& before = std::prev(next)->second;
      if (before.region == slot.region) {
        ASSERT_LE(before.offset + before.bytes, slot.offset);
      }
    }
    slots_[{slot.region, slot.offset}] = slot;
  }
  Slot TakeAny(std::mt19937& random) {
    auto at = slots_.begin();
    std::advance(at, static_cast<ptrdiff_t>(random() % slots_.size()));
    const Slot slot = at->second;
    slots_.erase(at);
    return slot;
  }
  const auto& slots() const { return slots_; }

 private:
  std::map<std::pair<uint32_t, uint64_t>, Slot> slots_;
};

TEST(SlotAllocator, SlotsOfMixedSizesNeverOverlap) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const uint64_t sizes[] = {1, 700, 37044, 262324, 1328404, 5000000};
  constexpr uint64_t kRegion = 48 * kMiB;
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(3, kRegion);
  allocator.AddRegion(7, kRegion);
  Model model;
  uint64_t used = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 100 < 55 || model.slots().empty()) {
      const uint64_t bytes = sizes[random() % std::size(sizes)];
      const std::optional<Slot> slot = allocator.Allocate(bytes, 1);
      if (!slot) continue;
      ASSERT_GE(slot->bytes, bytes);
      ASSERT_LT(slot->bytes, bytes + 512);
      model.Add(*slot, kRegion);
      if (HasFatalFailure()) return;
      used += slot->bytes;
    } else {
      const Slot slot = model.TakeAny(random);
      allocator.Free(slot);
      used -= slot.bytes;
    }
    ASSERT_EQ(allocator.used_bytes(), used);
  }
  while (!model.slots().empty()) allocator.Free(model.TakeAny(random));
  EXPECT_EQ(allocator.used_bytes(), 0u);
  EXPECT_EQ(allocator.waste_bytes(), 0u);
  EXPECT_EQ(allocator.chunk_bytes(), 0u);
  // Everything joined again: the largest slot fits.
  EXPECT_TRUE(allocator.Allocate(32 * kMiB, 1));
}

TEST(SlotAllocator, AFullRegionOfOneSizeLosesAtMostThreePercent) {
  for (const uint64_t bytes : {uint64_t{37044}, uint64_t{262324}, uint64_t{1328404},
                               uint64_t{9438484}, uint64_t{4608 * 3 + 160}}) {
    SlotAllocator allocator(kGranules);
    allocator.AddRegion(0, 256 * kMiB);
    uint64_t stored = 0;
    while (allocator.Allocate(bytes, 1)) stored += bytes;
    const uint64_t lost = 256 * kMiB - stored;
    EXPECT_LE(lost * 100, 3 * 256 * kMiB) << bytes;
    EXPECT_LE(allocator.waste_bytes(), lost);
  }
}

// Bytes of a region of 256 MiB that slots for `bytes` leave unused.
uint64_t LostBytes(const SlotAllocator::Rounding& rounding, uint64_t bytes) {
  SlotAllocator allocator(rounding);
  allocator.AddRegion(0, 256 * kMiB);
  uint64_t stored = 0;
  while (allocator.Allocate(bytes, 1)) stored += bytes;
  return 256 * kMiB - stored;
}

// A few sizes just above a fraction of a region lose a little more than 3 %, to granules too.
TEST(SlotAllocator, PagesLoseNoMoreThanGranulesWhereThatIsMuch) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 300; ++i) {
    const uint64_t bytes = 33000 + random() % (uint64_t{1} << (15 + random() % 9));
    const uint64_t allowed = std::max(32 * 256 * kMiB / 1000, LostBytes(kGranules, bytes));
    ASSERT_LE(LostBytes(kPages, bytes), allowed) << bytes;
  }
}

TEST(SlotAllocator, SlotsBeginOnPagesWhereThatCostsLittle) {
  SlotAllocator allocator(kPages);
  allocator.AddRegion(0, 256 * kMiB);
  for (const uint64_t bytes : {129296, 262324, 1050000, 1328404, 9438484}) {
    for (int i = 0; i < 3; ++i) {
      const std::optional<Slot> slot = allocator.Allocate(bytes, 1);
      ASSERT_TRUE(slot) << bytes;
      EXPECT_EQ(slot->offset % 4096, 0u) << bytes;
      EXPECT_EQ(slot->bytes, (bytes + 4095) / 4096 * 4096);
    }
  }
  const std::optional<Slot> small = allocator.Allocate(37044, 1);  // a page would lose 9 %
  ASSERT_TRUE(small);
  EXPECT_EQ(small->bytes, 37376u);
}

// Slots a little above 1 MiB: no chunk below 64 MiB loses 2 % or less.
TEST(SlotAllocator, RegionsTooSmallForAGoodChunkAreFilledAllTheSame) {
  SlotAllocator allocator(kGranules);
  for (uint32_t region = 0; region < 4; ++region) allocator.AddRegion(region, 16 * kMiB);
  Model model;
  int slots = 0;
  while (const auto slot = allocator.Allocate(kMiB + 700, 1)) {
    model.Add(*slot, 16 * kMiB);
    ++slots;
  }
  EXPECT_EQ(slots, 4 * 15);
  EXPECT_EQ(allocator.waste_bytes(), 4 * (16 * kMiB - 15 * (kMiB + 1024)));
}

TEST(SlotAllocator, ASmallStoreHoldsSeveralSizes) {
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(0, 64 * kMiB);
  for (const uint64_t bytes : {1328404, 9438484, 37044, 262324}) {
    EXPECT_TRUE(allocator.Allocate(bytes, 1)) << bytes;
  }
}

TEST(SlotAllocator, AnotherAllocatorClaimsTheSameSlots) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  SlotAllocator first(kPages);
  first.AddRegion(0, 64 * kMiB);
  std::vector<Slot> slots;
  for (int i = 0; i < 400; ++i) {
    if (const auto slot = first.Allocate(500 + random() % 3 * 40000, 1)) slots.push_back(*slot);
  }
  std::shuffle(slots.begin(), slots.end(), random);
  SlotAllocator second(kPages);
  second.AddRegion(0, 64 * kMiB);
  for (const Slot& slot : slots) ASSERT_TRUE(second.Claim(slot, 2));
  EXPECT_EQ(second.used_bytes(), first.used_bytes());
  EXPECT_EQ(second.waste_bytes(), first.waste_bytes());
  for (const Slot& slot : slots) EXPECT_FALSE(second.Claim(slot, 2)) << "claimed twice";
  // Slots that are given out next overlap none of them.
  Model model;
  for (const Slot& slot : slots) model.Add(slot, 64 * kMiB);
  while (const auto slot = second.Allocate(40500, 2)) model.Add(*slot, 64 * kMiB);
}

TEST(SlotAllocator, RefusesClaimsThatCannotBe) {
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(0, 4 * kMiB);
  const Slot good = {.region = 0, .bytes = 1024, .offset = kMiB, .chunk_order = 0};
  Slot bad = good;
  bad.region = 1;
  EXPECT_FALSE(allocator.Claim(bad, 1));
  bad = good;
  bad.offset += 512;  // no slot begins here
  EXPECT_FALSE(allocator.Claim(bad, 1));
  bad = good;
  bad.offset = 4 * kMiB;  // the end of the region
  EXPECT_FALSE(allocator.Claim(bad, 1));
  bad = good;
  bad.chunk_order = 40;
  EXPECT_FALSE(allocator.Claim(bad, 1));
  bad = good;
  bad.bytes = 0;
  EXPECT_FALSE(allocator.Claim(bad, 1));
  EXPECT_TRUE(allocator.Claim(good, 1));
  bad = good;
  bad.bytes = 2048;  // another size in the same chunk
  bad.offset = kMiB + 2048;
  EXPECT_FALSE(allocator.Claim(bad, 1));
  bad = good;
  bad.chunk_order = 2;  // a chunk around one that is there
  bad.offset = 0;
  EXPECT_FALSE(allocator.Claim(bad, 1));
}

TEST(SlotAllocator, ARegionLeavesWhenItIsEmpty) {
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(0, 4 * kMiB);
  allocator.AddRegion(1, 4 * kMiB);
  const auto slot = allocator.Allocate(1000, 9);
  ASSERT_TRUE(slot);
  EXPECT_FALSE(allocator.RemoveRegion(slot->region));
  uint64_t offset = 0;
  std::vector<uint32_t> owners;
  EXPECT_TRUE(allocator.NextOwners(slot->region, offset, owners));
  EXPECT_EQ(owners, std::vector<uint32_t>{9});
  EXPECT_FALSE(allocator.NextOwners(slot->region, offset, owners));
  EXPECT_EQ(allocator.EmptiestRegion(), 1 - slot->region);
  EXPECT_TRUE(allocator.RemoveRegion(1 - slot->region));
  EXPECT_EQ(allocator.capacity_bytes(), 4 * kMiB);
  while (const auto next = allocator.Allocate(1000, 9)) ASSERT_EQ(next->region, slot->region);
}

// Each slot is seen once, in pieces of a chunk, whatever leaves and comes between the pieces.
TEST(SlotAllocator, OwnersAreReadChunkByChunk) {
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(0, 16 * kMiB);
  allocator.AddRegion(1, 1 * kMiB);
  std::vector<Slot> slots;
  for (uint32_t owner = 0; owner < 6000; ++owner) {
    auto slot = allocator.Allocate(owner % 3 == 0 ? 512 : 2048, owner);
    ASSERT_TRUE(slot);
    if (slot->region == 0) slots.push_back(*slot);
  }
  uint64_t offset = 0;
  std::vector<uint32_t> owners;
  std::multiset<uint32_t> seen;
  size_t pieces = 0;
  while (allocator.NextOwners(0, offset, owners)) {
    ++pieces;
    EXPECT_LE(owners.size(), 2048u);
    seen.insert(owners.begin(), owners.end());
    // The first slots leave when they have been seen, and nothing that was passed is seen again.
    if (pieces == 1) {
      for (const Slot& slot : slots) {
        if (slot.offset < offset) allocator.Free(slot);
      }
    }
  }
  EXPECT_GT(pieces, 4u);
  EXPECT_EQ(seen.size(), slots.size());
  EXPECT_EQ(std::set<uint32_t>(seen.begin(), seen.end()).size(), slots.size());
  uint64_t nothing = 0;
  EXPECT_FALSE(allocator.NextOwners(7, nothing, owners)) << "no such region";
}

TEST(SlotAllocator, ARegionGrowsAndItsPartsJoin) {
  constexpr uint64_t kSlot = 512 << 10;
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(2, 0);
  EXPECT_EQ(allocator.Allocate(kSlot, 1), std::nullopt);
  Model model;
  uint64_t slots = 0;
  for (const uint64_t mib : {3, 3, 4, 13, 16}) {
    allocator.GrowRegion(2, mib * kMiB + 5);
    EXPECT_EQ(allocator.capacity_bytes(), mib * kMiB);
    for (auto slot = allocator.Allocate(kSlot, 1); slot; slot = allocator.Allocate(kSlot, 1)) {
      model.Add(*slot, mib * kMiB);
      ++slots;
    }
    EXPECT_EQ(slots, mib * 2);
  }
  for (const auto& [at, slot] : model.slots()) allocator.Free(slot);
  EXPECT_EQ(allocator.used_bytes(), 0u);
  EXPECT_TRUE(allocator.Allocate(16 * kMiB, 1).has_value()) << "the parts did not join";
}

TEST(SlotAllocator, NamesANearlyEmptyChunkOfAnotherSize) {
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(0, 2 * kMiB);
  std::vector<Slot> slots;
  while (const auto slot = allocator.Allocate(10000, static_cast<uint32_t>(slots.size()))) {
    slots.push_back(*slot);
  }
  // Two chunks: the second keeps three slots, the first half of them.
  for (size_t i = 0; i < slots.size(); ++i) {
    const bool keep = slots[i].offset < kMiB ? i % 2 == 0 : i + 3 >= slots.size();
    if (!keep) allocator.Free(slots[i]);
  }
  EXPECT_FALSE(allocator.Allocate(20000, 1).has_value());
  EXPECT_EQ(allocator.OwnersOfNearlyEmptyChunk(20000).size(), 3u);
  EXPECT_TRUE(allocator.OwnersOfNearlyEmptyChunk(10000).empty());
}

// The owners of a chunk that OwnersOfNearlyEmptyChunk may name for `rounded` bytes, worked out from
// the slots that are out; 0: there is none.
uint32_t FewestInNearlyEmptyChunk(const std::vector<Slot>& out, uint32_t rounded) {
  std::map<std::pair<uint32_t, uint64_t>, std::pair<Slot, uint32_t>> chunks;  // slots in use
  for (const Slot& slot : out) {
    const uint64_t chunk_bytes = SlotAllocator::kChunkBytesMin << slot.chunk_order;
    auto& chunk = chunks[{slot.region, slot.offset / chunk_bytes * chunk_bytes}];
    chunk.first = slot;
    ++chunk.second;
  }
  std::map<uint32_t, int> with_room;
  const auto slots_of = [](const Slot& slot) {
    return (SlotAllocator::kChunkBytesMin << slot.chunk_order) / slot.bytes;
  };
  for (const auto& [at, chunk] : chunks) {
    with_room[chunk.first.bytes] += chunk.second < slots_of(chunk.first);
  }
  uint32_t fewest = 0;
  for (const auto& [at, chunk] : chunks) {
    const auto& [slot, used] = chunk;
    if (slot.bytes == rounded || with_room[slot.bytes] < 2 || used * 8 > slots_of(slot)) continue;
    if (fewest == 0 || used < fewest) fewest = used;
  }
  return fewest;
}

TEST(SlotAllocator, TheNearlyEmptyChunkIsTheEmptiestOfAnotherSize) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const uint32_t sizes[] = {512, 2048, 10240, 37376};  // multiples of the granule
  SlotAllocator allocator(kGranules);
  for (uint32_t region = 0; region < 3; ++region) allocator.AddRegion(region, 8 * kMiB);
  std::vector<Slot> out;
  int named = 0;
  for (int step = 0; step < 6000; ++step) {
    // Fills and empties in turns, so that there are chunks of every kind.
    const bool fills = step / 1000 % 2 == 0;
    if (random() % 100 < (fills ? 80 : 20) || out.empty()) {
      if (const auto slot = allocator.Allocate(sizes[random() % 4], 7)) out.push_back(*slot);
    } else {
      std::swap(out[random() % out.size()], out.back());
      allocator.Free(out.back());
      out.pop_back();
    }
    if (step == 3000) allocator.CloseRegion(1);
    if (step % 10 != 0) continue;
    const uint32_t wanted = sizes[random() % 4];
    std::vector<Slot> open;
    for (const Slot& slot : out) {
      if (step < 3000 || slot.region != 1) open.push_back(slot);
    }
    const auto owners = allocator.OwnersOfNearlyEmptyChunk(wanted);
    ASSERT_EQ(owners.size(), FewestInNearlyEmptyChunk(open, wanted)) << step;
    named += !owners.empty();
  }
  EXPECT_GT(named, 20) << "the walk met too few nearly empty chunks to say anything";
}

TEST(SlotAllocator, PartitionsAreCutAsIfEachWereAlone) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const uint64_t sizes[] = {700, 37044, 262324};
  constexpr uint32_t kPartitions = 3;
  // One allocator for all, and one for each.
  SlotAllocator together(kGranules);
  std::vector<SlotAllocator> alone(kPartitions, SlotAllocator(kGranules));
  for (uint32_t region = 0; region < 2 * kPartitions; ++region) {
    together.AddRegion(region, 4 * kMiB, region % kPartitions);
    alone[region % kPartitions].AddRegion(region, 4 * kMiB);
  }
  std::vector<std::pair<uint32_t, Slot>> out;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 100 < 60 || out.empty()) {
      const uint32_t partition = random() % kPartitions;
      const uint64_t bytes = sizes[random() % std::size(sizes)];
      const auto slot = together.Allocate(bytes, 1, partition);
      const auto expected = alone[partition].Allocate(bytes, 1);
      ASSERT_EQ(slot.has_value(), expected.has_value());
      if (!slot) continue;
      ASSERT_EQ(*slot, *expected);
      ASSERT_EQ(slot->region % kPartitions, partition);
      out.emplace_back(partition, *slot);
    } else {
      const size_t index = random() % out.size();
      together.Free(out[index].second);
      alone[out[index].first].Free(out[index].second);
      out.erase(out.begin() + static_cast<ptrdiff_t>(index));
    }
  }
  uint64_t used = 0;
  for (const SlotAllocator& one : alone) used += one.used_bytes();
  EXPECT_EQ(together.used_bytes(), used);
}

TEST(SlotAllocator, AClosedRegionOnlyEmpties) {
  SlotAllocator allocator(kGranules);
  allocator.AddRegion(0, 2 * kMiB, 5);
  std::vector<Slot> slots;
  while (const auto slot = allocator.Allocate(100'000, 1, 5)) slots.push_back(*slot);
  ASSERT_GT(slots.size(), 10u);
  allocator.CloseRegion(0);
  allocator.Free(slots.back());
  slots.pop_back();
  EXPECT_FALSE(allocator.Allocate(100'000, 1, 5));  // though there is room
  EXPECT_FALSE(allocator.Allocate(512, 1, 5));
  EXPECT_FALSE(allocator.RemoveRegion(0));
  for (const Slot& slot : slots) allocator.Free(slot);
  EXPECT_EQ(allocator.used_bytes(0), 0u);
  EXPECT_FALSE(allocator.Allocate(512, 1, 5));
  EXPECT_TRUE(allocator.RemoveRegion(0));
  EXPECT_EQ(allocator.capacity_bytes(), 0u);
  allocator.AddRegion(0, 2 * kMiB, 6);  // another's now
  EXPECT_FALSE(allocator.Allocate(512, 1, 5));
  EXPECT_TRUE(allocator.Allocate(512, 1, 6));
}

}  // namespace
}  // namespace crumb::storage
