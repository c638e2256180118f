// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The bound of fragments on SSD, which bounds the memory of the index.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/ssd/ssd_tier.h"
#include "tests/common/fake_clock.h"
#include "tests/common/temporary_folder.h"
#include "tests/storage/store_calls.h"

namespace crumb::storage {
namespace {

using testing::Each;
using testing::Property;

class SsdTierRoomTest : public testing::Test {
 protected:
  static constexpr uint64_t kFragmentsMax = 100;

  SsdTierRoomTest() {
    options_.path = folder_.path() + "/ssd";
    options_.bytes_max = ByteSize{uint64_t{64} << 20};
    options_.policy = "lru";
    options_.fragments_max = kFragmentsMax;
    Open();
  }

  void Open() {
    tier_.reset();
    tier_ = SsdTier::Open(options_, clock_, {}).value();
  }
  // One call with one page of each sequence, in `fragments` parts.
  std::vector<absl::Status> PutPages(uint64_t first, uint64_t count, uint16_t fragments = 1) {
    std::vector<SampleFragment> samples;
    for (uint64_t i = first; i < first + count; ++i) {
      for (uint16_t part = 0; part < fragments; ++part) {
        SampleFragment sample = SamplePage(i, 0);
        if (fragments > 1) sample.range.layers = {part, static_cast<uint16_t>(part + 1)};
        samples.push_back(sample);
      }
    }
    std::vector<std::vector<std::byte>> bytes;
    bytes.reserve(samples.size());
    std::vector<FragmentWrite> writes;
    for (const SampleFragment& sample : samples) {
      bytes.push_back(BytesOf(sample));
      writes.push_back({MetaOf(sample), bytes.back()});
    }
    return tier_->Put(writes);
  }
  bool Has(uint64_t sequence) const {
    return !tier_->Find(SampleKeyspace(0), SampleKey(sequence, 0)).empty();
  }
  uint64_t Pages() const {
    StoreStats stats;
    tier_->AddStats(stats);
    return stats.ssd.pages;
  }

  TemporaryFolder folder_;
  SsdOptions options_;
  FakeClock clock_;
  std::unique_ptr<FragmentTier> tier_;
};

TEST_F(SsdTierRoomTest, FurtherPagesTakeThePlacesOfTheOldest) {
  for (uint64_t i = 0; i < 400; i += 16) {
    ASSERT_THAT(PutPages(i, 16), Each(Property(&absl::Status::ok, true)));
    EXPECT_LE(Pages(), kFragmentsMax);
  }
  EXPECT_GT(Pages(), kFragmentsMax / 2);
  EXPECT_TRUE(Has(399));
  EXPECT_FALSE(Has(0));
  Open();
  EXPECT_LE(Pages(), kFragmentsMax) << "entries of pages that left came back";
  EXPECT_TRUE(Has(399));
}

TEST_F(SsdTierRoomTest, EachFragmentOfAPageCounts) {
  for (uint64_t i = 0; i < 120; i += 10) {
    ASSERT_THAT(PutPages(i, 10, /*fragments=*/2), Each(Property(&absl::Status::ok, true)));
    EXPECT_LE(Pages(), kFragmentsMax / 2);
  }
  EXPECT_GT(Pages(), kFragmentsMax / 4);
}

TEST_F(SsdTierRoomTest, ASmallerBoundTakesEffectAtTheNextStart) {
  ASSERT_THAT(PutPages(0, 90), Each(Property(&absl::Status::ok, true)));
  const std::vector<PageKey> used = {SampleKey(3, 0)};
  tier_->Touch(SampleKeyspace(0), used);
  options_.fragments_max = 10;
  Open();
  EXPECT_LE(Pages(), 10u);
  EXPECT_TRUE(Has(3)) << "the page that was used last left";
  EXPECT_THAT(PutPages(500, 5), Each(Property(&absl::Status::ok, true)));
  EXPECT_LE(Pages(), 10u);
}

TEST_F(SsdTierRoomTest, PinnedPagesKeepTheirPlaces) {
  ASSERT_THAT(PutPages(0, kFragmentsMax), Each(Property(&absl::Status::ok, true)));
  std::vector<PageKey> keys;
  for (uint64_t i = 0; i < kFragmentsMax; ++i) keys.push_back(SampleKey(i, 0));
  tier_->Pin(SampleKeyspace(0), keys, clock_.Now() + std::chrono::hours(1));
  EXPECT_THAT(PutPages(500, 1),
              Each(Property(&absl::Status::code, absl::StatusCode::kUnavailable)));
  EXPECT_EQ(Pages(), kFragmentsMax);
}

}  // namespace
}  // namespace crumb::storage
