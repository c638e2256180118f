// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Index entries with right checksums and any numbers in them: recovery believes none that could not
// have been written here, and the tier works on.

#include <filesystem>
#include <fstream>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/ssd/index_budget.h"
#include "storage/ssd/ssd_index.h"
#include "storage/ssd/ssd_tier.h"
#include "tests/common/fake_clock.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

constexpr uint64_t kPages = 30;
constexpr uint64_t kHostileSequence = 1000;

class HostileIndexTest : public testing::Test {
 protected:
  HostileIndexTest() {
    options_.path = folder_.path() + "/ssd";
    options_.bytes_max = ByteSize{uint64_t{32} << 20};
    options_.policy = "lru";
  }

  void Open() {
    auto opened = SsdTier::Open(options_, clock_, {});
    ASSERT_TRUE(opened.ok()) << opened.status();
    tier_ = *std::move(opened);
  }
  void PutPages(uint64_t sequence) {
    for (uint64_t i = 0; i < kPages; ++i) {
      const std::vector<std::byte> bytes = BytesOf(SamplePage(sequence, i));
      const FragmentWrite write = {MetaOf(SamplePage(sequence, i)), bytes};
      ASSERT_TRUE(tier_->Put(std::span(&write, 1))[0].ok());
    }
  }
  absl::Status Get(const FragmentMeta& meta) {
    std::vector<std::byte> room((meta.bytes + 511) / 512 * 512);
    const absl::Status status = tier_->Get(meta, room);
    if (status.ok() && !IsRight(room, meta.keyspace, meta.key, meta.tiles_bytes)) {
      ADD_FAILURE() << "wrong bytes were served";
    }
    return status;
  }
  // A folder with `kPages` pages of sequence 1, closed, and these entries besides.
  void Plant(const std::vector<IndexEntry>& entries) {
    tier_.reset();
    std::filesystem::remove_all(options_.path);
    Open();
    PutPages(1);
    tier_.reset();
    auto index =
        SsdIndex::Open(options_.path + "/index", IndexBufferBytes(options_.bytes_max.value));
    ASSERT_TRUE(index.ok()) << index.status();
    ASSERT_TRUE((*index)->StartWriting().ok());
    IndexBatch batch;
    uint64_t access = UINT64_MAX;
    for (const IndexEntry& entry : entries) {
      const FragmentMeta& meta = entry.meta;
      batch.Put(FragmentKey(meta.keyspace, meta.key, meta.range), EncodeIndexEntry(entry));
      batch.Put(AccessKey(meta.keyspace, meta.key), EncodeNumber(access--));
    }
    ASSERT_TRUE((*index)->Write(batch).ok());
  }
  // Recovers with these entries and uses the tier.
  void Survive(const std::vector<IndexEntry>& entries) {
    Plant(entries);
    Open();
    for (uint64_t i = 0; i < kPages; ++i) {
      EXPECT_TRUE(Get(MetaOf(SamplePage(1, i))).ok()) << "a page that was written here, " << i;
    }
    for (const IndexEntry& entry : entries) {
      for (const FragmentMeta& found : tier_->Find(entry.meta.keyspace, entry.meta.key)) {
        if (found.bytes < uint32_t{1} << 24) {
          EXPECT_FALSE(Get(found).ok()) << "nothing was written there";
        }
      }
    }
    PutPages(2);
    for (uint64_t i = 0; i < kPages; ++i) {
      EXPECT_TRUE(Get(MetaOf(SamplePage(2, i))).ok()) << "a page that is written behind it, " << i;
    }
  }
  static IndexEntry Entry(uint64_t number, const Slot& slot) {
    return {MetaOf(SamplePage(kHostileSequence, number)), slot};
  }

  TemporaryFolder folder_{TemporaryFolder::Place::kMemory};
  SsdOptions options_;
  FakeClock clock_;
  std::unique_ptr<FragmentTier> tier_;
};

TEST_F(HostileIndexTest, SumsThatWrapAreNoPlaceInAnExtent) {
  const uint32_t bytes = (MetaOf(SamplePage(1, 0)).bytes + 511) / 512 * 512;
  std::vector<IndexEntry> entries;
  uint64_t number = 0;
  for (const uint8_t order : {uint8_t{0}, uint8_t{1}, uint8_t{4}, uint8_t{31}, uint8_t{255}}) {
    for (const uint64_t back :
         {uint64_t{bytes}, uint64_t{1}, uint64_t{1} << 20, uint64_t{1} << 24, uint64_t{1} << 32}) {
      entries.push_back(
          Entry(number++,
                {.region = 0, .bytes = bytes, .offset = uint64_t{0} - back, .chunk_order = order}));
    }
  }
  // One that lies in its chunk as a slot does: only the bounds can refuse it.
  const uint64_t last_chunk = uint64_t{0} - (uint64_t{1} << 20);
  const uint64_t slots = (uint64_t{1} << 20) / bytes;
  entries.push_back(Entry(
      number++,
      {.region = 0, .bytes = bytes, .offset = last_chunk + (slots - 1) * bytes, .chunk_order = 0}));
  entries.push_back(Entry(
      number++, {.region = 0, .bytes = uint32_t{1} << 20, .offset = last_chunk, .chunk_order = 0}));
  Survive(entries);
}

TEST_F(HostileIndexTest, AnyNumbersAreSurvived) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  // Near powers of two, where sums and products wrap, and near the ends of an extent.
  const auto edge = [&random](int bits_max) {
    const uint64_t power = uint64_t{1} << (random() % static_cast<uint64_t>(bits_max));
    return (random() % 2 == 0 ? power : uint64_t{0} - power) + random() % 1025 - 512;
  };
  for (int round = 0; round < 12; ++round) {
    std::vector<IndexEntry> entries;
    for (uint64_t number = 0; number < 200; ++number) {
      IndexEntry entry = Entry(number, {});
      entry.meta.range.layers = {static_cast<uint16_t>(random() % 3),
                                 static_cast<uint16_t>(3 + edge(16) % 60000)};
      entry.meta.range.heads = {0, static_cast<uint16_t>(1 + random() % 4)};
      entry.meta.tiles_bytes = static_cast<uint32_t>(edge(32));
      entry.meta.bytes = entry.meta.tiles_bytes +
                         static_cast<uint32_t>(FragmentHeaderBytes(entry.meta.range.tiles()));
      entry.meta.logical_tile_bytes = static_cast<uint32_t>(edge(32));
      entry.slot.region = static_cast<uint32_t>(random() % 4 == 0 ? random() : 0);
      entry.slot.bytes = static_cast<uint32_t>(
          random() % 2 == 0 ? edge(32) : (uint64_t{entry.meta.bytes} + 511) / 512 * 512);
      // Behind the pages that are there, or beyond everything.
      entry.slot.offset = std::max(edge(64) / 512 * 512, uint64_t{8} << 20);
      // Within the extent, in a chunk that begins behind the pages.
      const bool inside = entry.slot.offset < uint64_t{64} << 20;
      entry.slot.chunk_order = static_cast<uint8_t>(random() % (inside ? 4 : 40));
      entries.push_back(entry);
    }
    Survive(entries);
    if (HasFailure()) return;
  }
}

// An entry of a page that this folder cannot hold as its key demands.
TEST_F(HostileIndexTest, ASlotWithoutRoomForTheSealIsRefused) {
  options_.key_file = folder_.path() + "/key";
  std::ofstream(options_.key_file) << std::string(64, 'a') << "\n";
  IndexEntry entry = Entry(0, {.region = 0, .bytes = 0, .offset = uint64_t{8} << 20});
  entry.meta.tiles_bytes = 1024 - static_cast<uint32_t>(FragmentHeaderBytes(4));
  entry.meta.bytes = 1024;
  entry.slot.bytes = 1024;
  Plant({entry});
  Open();
  EXPECT_TRUE(tier_->Find(entry.meta.keyspace, entry.meta.key).empty());
}

}  // namespace
}  // namespace crumb::storage
