// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host_image.h"

#include <random>

#include "common/crc32c.h"
#include "common/little_endian.h"
#include "gtest/gtest.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

HostImage Sample() {
  HostImage image;
  image.slab_bytes = 2 << 20;
  image.slabs = 3;
  image.tenants = {"one", "", "two"};
  image.generations = {{SampleKeyspace(1), 7}, {SampleKeyspace(2), UINT64_MAX}};
  image.deleted = {{SampleKeyspace(1), false, {SampleKey(7, 0), SampleKey(7, 1)}},
                   {SampleKeyspace(2), true, {}}};
  image.revoked = {{"one", 3}, {"", 1}};
  image.losses = LossLedger::State{.mark_base = 1'700'000'000'000'000'000,
                                   .all = {.pages = 9, .reported = 4},
                                   .tenants = {{"one", {.pages = 5, .reported = 5}}, {"", {}}},
                                   .no_owner = {{SampleKeyspace(4), 2}}};
  image.records = {{"node-id", "abc"}, {"empty", ""}, {"", std::string("\0x", 2)}};
  for (uint32_t i = 0; i < 5; ++i) {
    const SampleFragment sample = SamplePage(3, i);
    HostImage::Page page = {.keyspace = sample.keyspace,
                            .key = sample.key,
                            .parent = sample.parent,
                            .generation = 4 + i,
                            .was_hit = i % 2 == 0,
                            .added = TimePoint(std::chrono::nanoseconds(1000 + i)),
                            .used = TimePoint(std::chrono::nanoseconds(2000 + i)),
                            .pinned_until = TimePoint::min(),
                            .fragments = {}};
    for (uint16_t part = 0; part <= i % 2; ++part) {
      const uint16_t begin = part;
      const uint16_t end = static_cast<uint16_t>(part + 1);
      page.fragments.push_back({.range = {{begin, end}, {0, 4}},
                                .tiles_bytes = 4 * 4608,
                                .bytes = 4 * 4608 + 164,
                                .logical_tile_bytes = 32768,
                                .slot = {.region = i % 3,
                                         .bytes = 18944,
                                         .offset = uint64_t{i} * 65536 + part * 18944u,
                                         .chunk_order = 1}});
    }
    image.pages.push_back(page);
  }
  return image;
}

// Makes the sum right again, as a writer that lies would.
std::string WithSum(std::string bytes) {
  const size_t content = bytes.size() - 4;
  StoreLittle(reinterpret_cast<std::byte*>(bytes.data()) + content,
              Crc32c(Bytes(bytes).first(content)));
  return bytes;
}

TEST(HostImage, RoundTrip) {
  for (const HostImage& image : {HostImage(), Sample()}) {
    const auto decoded = DecodeHostImage(Bytes(EncodeHostImage(image)));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(*decoded == image);
  }
}

TEST(HostImage, GoldenHead) {
  const std::string bytes = EncodeHostImage(HostImage());
  ASSERT_EQ(bytes.size(), 85u);
  EXPECT_EQ(bytes.substr(0, 8), "CRMBHOST");
  EXPECT_EQ(LoadLittle<uint16_t>(Bytes(bytes).data() + 8), 4);   // version
  EXPECT_EQ(LoadLittle<uint16_t>(Bytes(bytes).data() + 10), 4);  // version of the oldest reader
  EXPECT_EQ(LoadLittle<uint64_t>(Bytes(bytes).data() + 16), 85u);
  EXPECT_EQ(bytes, WithSum(bytes));
}

TEST(HostImage, EveryTruncationAndEveryFlippedBitIsRefused) {
  const std::string whole = EncodeHostImage(Sample());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(DecodeHostImage(Bytes(whole).first(size)).ok()) << size;
  }
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(DecodeHostImage(Bytes(flipped)).ok()) << bit;
  }
}

TEST(HostImage, NeedsItsReader) {
  std::string bytes = EncodeHostImage(Sample());
  StoreLittle(reinterpret_cast<std::byte*>(bytes.data()) + 8, uint16_t{5});
  EXPECT_TRUE(DecodeHostImage(Bytes(WithSum(bytes))).ok()) << "a newer writer, for old readers";
  StoreLittle(reinterpret_cast<std::byte*>(bytes.data()) + 10, uint16_t{5});
  EXPECT_TRUE(absl::IsFailedPrecondition(DecodeHostImage(Bytes(WithSum(bytes))).status()));
}

// The image of `OnePage` as writers of versions 1 to 4 make it, put together by another program
// from docs/formats/host-image.md. These bytes never change.
constexpr const char* kGolden[] = {
    // version 1
    "43524d42484f535401000100000000001c010000000000000000100000000000010000000100000000000000"
    "1111111111111111111111111111111111111111111111111111111111111111070000000000000001000000"
    "00000000010000006e0100000076010000000000000011111111111111111111111111111111111111111111"
    "1111111111111111111122222222222222222222222222222222222222222222222222222222222222223333"
    "333333333333333333333333333333333333333333333333333333333333040000000000000001e803000000"
    "000000d007000000000000ffffffffffffffff01000000000001000000040000480000a44800000080000000"
    "000000004a0000000001000000000001418a1056",
    // version 2
    "43524d42484f5354020002000000000025010000000000000000100000000000010000000100000001000000"
    "6101000000000000001111111111111111111111111111111111111111111111111111111111111111070000"
    "00000000000100000000000000010000006e0100000076010000000000000011111111111111111111111111"
    "1111111111111111111111111111111111111122222222222222222222222222222222222222222222222222"
    "2222222222222233333333333333333333333333333333333333333333333333333333333333330400000000"
    "00000001e803000000000000d007000000000000ffffffffffffffff01000000000001000000040000480000"
    "a44800000080000000000000004a000000000100000000000164df11b0",
    // version 3
    "43524d42484f535403000300000000009f010000000000000000100000000000010000000100000001000000"
    "6101000000000000001111111111111111111111111111111111111111111111111111111111111111070000"
    "00000000000100000000000000010000006e0100000076010000000000000011111111111111111111111111"
    "1111111111111111111111111111111111111100010000000000000022222222222222222222222222222222"
    "2222222222222222222222222222222201050000000000000003000000000000000100000000000000000000"
    "0000000000000000000000000001000000000000001111111111111111111111111111111111111111111111"
    "1111111111111111112222222222222222222222222222222222222222222222222222222222222222333333"
    "3333333333333333333333333333333333333333333333333333333333040000000000000001e80300000000"
    "0000d007000000000000ffffffffffffffff01000000000001000000040000480000a4480000008000000000"
    "0000004a0000000001000000000001a0bb8e71",
    // version 4
    "43524d42484f53540400040000000000b4010000000000000000100000000000010000000100000001000000"
    "6101000000000000001111111111111111111111111111111111111111111111111111111111111111070000"
    "00000000000100000000000000010000006e0100000076010000000000000011111111111111111111111111"
    "1111111111111111111111111111111111111100010000000000000022222222222222222222222222222222"
    "2222222222222222222222222222222201000000000000000100000061020000000000000001050000000000"
    "0000030000000000000001000000000000000000000000000000000000000000000001000000000000001111"
    "1111111111111111111111111111111111111111111111111111111111112222222222222222222222222222"
    "2222222222222222222222222222222222223333333333333333333333333333333333333333333333333333"
    "333333333333040000000000000001e803000000000000d007000000000000ffffffffffffffff0100000000"
    "0001000000040000480000a44800000080000000000000004a0000000001000000000001203dcc56",
};

std::string FromHex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}

// The image of kGolden[version - 1].
HostImage OnePage(int version) {
  HostImage image;
  image.slab_bytes = 1 << 20;
  image.slabs = 1;
  if (version >= 2) image.tenants = {"a"};
  HostImage::Page page;
  page.keyspace.bytes.fill(0x11);
  page.key.bytes.fill(0x22);
  page.parent.bytes.fill(0x33);
  page.generation = 4;
  page.was_hit = true;
  page.added = TimePoint(std::chrono::nanoseconds(1000));
  page.used = TimePoint(std::chrono::nanoseconds(2000));
  page.pinned_until = TimePoint(std::chrono::nanoseconds(-1));
  page.fragments.push_back(
      {.range = {{0, 1}, {0, 4}},
       .tiles_bytes = 18432,
       .bytes = 18596,
       .logical_tile_bytes = 32768,
       .slot = {.region = 0, .bytes = 18944, .offset = 65536, .chunk_order = 1}});
  image.generations = {{page.keyspace, 7}};
  image.records = {{"n", "v"}};
  if (version >= 3) {
    image.deleted = {{page.keyspace, false, {page.key}}};
    image.losses = LossLedger::State{
        .mark_base = 5, .all = {.pages = 3, .reported = 1}, .tenants = {}, .no_owner = {}};
  }
  if (version >= 4) image.revoked = {{"a", 2}};
  image.pages.push_back(std::move(page));
  return image;
}

TEST(HostImage, ReadsWhatEveryVersionWrote) {
  for (int version = 1; version <= kHostImageVersion; ++version) {
    SCOPED_TRACE(version);
    const auto decoded = DecodeHostImage(Bytes(FromHex(kGolden[version - 1])));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(*decoded == OnePage(version));
  }
  EXPECT_EQ(EncodeHostImage(OnePage(kHostImageVersion)), FromHex(kGolden[kHostImageVersion - 1]));
}

TEST(HostImage, RefusesTheImpossible) {
  const auto refused = [](auto change) {
    HostImage image = Sample();
    change(image, image.pages[3].fragments[0]);
    return absl::IsDataLoss(DecodeHostImage(Bytes(EncodeHostImage(image))).status());
  };
  using Fragment = HostImage::Fragment;
  EXPECT_FALSE(refused([](HostImage&, Fragment&) {}));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.slot.region = 3; }));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.slot.offset = (2 << 20) - 18943; }));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.slot.offset = UINT64_MAX - 5; }));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.bytes = f.slot.bytes + 1; }));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.tiles_bytes = f.bytes; }));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.tiles_bytes = 0; }));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.range.layers = {3, 3}; }));
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.range = {{0, 1000}, {0, 1000}}; }));
  // More tiles than an int counts.
  EXPECT_TRUE(refused([](HostImage&, Fragment& f) { f.range = {{0, 65535}, {0, 65535}}; }));
  EXPECT_TRUE(refused([](HostImage& image, Fragment&) { image.slabs = 1 << 17; }));
  EXPECT_TRUE(refused([](HostImage& image, Fragment&) { image.tenants.pop_back(); }));
  EXPECT_TRUE(refused([](HostImage& image, Fragment&) { image.pages[0].fragments.clear(); }));
  EXPECT_TRUE(refused([](HostImage& image, Fragment&) { image.revoked["one"] = UINT64_MAX; }));
  EXPECT_TRUE(refused([](HostImage& image, Fragment&) { image.losses->mark_base = UINT64_MAX; }));
  EXPECT_TRUE(refused([](HostImage& image, Fragment&) { image.losses->all.pages = UINT64_MAX; }));
  EXPECT_TRUE(refused([](HostImage& image, Fragment&) { image.losses->all.reported = 10; }));
  EXPECT_TRUE(
      refused([](HostImage& image, Fragment&) { image.losses->tenants["one"].pages = 10; }));
}

TEST(HostImage, TakesLyingCountsAndRandomBytes) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string whole = EncodeHostImage(Sample());
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = whole;
    for (uint32_t changes = random() % 8 + 1; changes > 0; --changes) {
      bytes[24 + random() % (bytes.size() - 28)] =
          static_cast<char>(random() % 3 == 0 ? 0xff : random());
    }
    const auto decoded = DecodeHostImage(Bytes(WithSum(bytes)));
    if (!decoded.ok()) continue;
    for (const HostImage::Page& page : decoded->pages) {
      for (const HostImage::Fragment& fragment : page.fragments) {
        ASSERT_LT(fragment.slot.region, decoded->slabs);
        ASSERT_LE(fragment.slot.offset + fragment.slot.bytes, decoded->slab_bytes);
        ASSERT_LT(fragment.tiles_bytes, fragment.bytes);
        ASSERT_LE(fragment.bytes, fragment.slot.bytes);
      }
    }
  }
}

}  // namespace
}  // namespace crumb::storage
