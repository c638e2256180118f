// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/departure_queue.h"

#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

constexpr uint32_t kMiB = 1 << 20;

class DepartureQueueTest : public testing::Test {
 protected:
  // Queues a fragment whose page has the tenant's name in its upper bits, so that Taken can find
  // the tenant.
  bool Push(char tenant, uint32_t bytes = kMiB) {
    Departure departure;
    departure.page = static_cast<PageHandle>(tenant) << 16 | count_++;
    departure.meta.bytes = bytes;
    return queue_.Push(std::string(1, tenant), departure);
  }
  // Takes one batch; returns the tenants of its fragments, in order.
  std::string Take() {
    std::vector<Departure> batch;
    queue_.TakeBatch(&batch);
    std::string tenants;
    for (const Departure& departure : batch) tenants += static_cast<char>(departure.page >> 16);
    return tenants;
  }

  uint32_t count_ = 0;
  DepartureQueue queue_{
      {.fragments_max = 256, .bytes_max = uint64_t{256} * kMiB, .part_max_percent = 50}};
};

TEST_F(DepartureQueueTest, ATenantHasItsPartOfTheFragments) {
  for (int i = 0; i < 128; ++i) ASSERT_TRUE(Push('a', 1)) << i;
  EXPECT_FALSE(Push('a', 1));
  EXPECT_EQ(queue_.RoomBytes("a"), 0u);
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(Push('b', 1)) << i;
  EXPECT_FALSE(Push('b', 1));
  EXPECT_EQ(queue_.size(), 192u);
  EXPECT_EQ(queue_.bytes(), 192u);
}

TEST_F(DepartureQueueTest, ATenantHasItsPartOfTheBytes) {
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(Push('a', 60 * kMiB));
  EXPECT_EQ(queue_.RoomBytes("a"), uint64_t{8} * kMiB);
  EXPECT_FALSE(Push('a', 9 * kMiB));
  EXPECT_TRUE(Push('a', 8 * kMiB));
  ASSERT_TRUE(Push('b', 60 * kMiB));
  EXPECT_EQ(queue_.RoomBytes("b"), uint64_t{4} * kMiB);
  // The part of c is 34 MiB. Its first fragment may be larger than that, but not than the room
  // left.
  EXPECT_FALSE(Push('c', 69 * kMiB));
  EXPECT_TRUE(Push('c', 68 * kMiB));
  EXPECT_EQ(queue_.RoomBytes("d"), 0u);
}

TEST_F(DepartureQueueTest, APlaceIsFreeOnceItsFragmentIsTaken) {
  while (Push('a')) {
  }
  EXPECT_EQ(Take(), std::string(64, 'a'));
  EXPECT_EQ(queue_.size(), 64u);
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(Push('a')) << i;
  EXPECT_FALSE(Push('a'));
}

TEST_F(DepartureQueueTest, TenantsTakeTurnsWhateverTheyQueued) {
  for (const char tenant : std::string("aaaaabbbcc")) ASSERT_TRUE(Push(tenant));
  EXPECT_EQ(Take(), "abcabcabaa");
  EXPECT_TRUE(queue_.empty());
}

TEST_F(DepartureQueueTest, TurnsAreFairInBytes) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Push('a', 4 * kMiB));
  for (int i = 0; i < 12; ++i) ASSERT_TRUE(Push('b', kMiB));
  EXPECT_EQ(Take(), "abbbbabbbbabbbb");
}

// A small fragment costs as much of a batch as one of its 64 places.
TEST_F(DepartureQueueTest, SmallFragmentsCountAsOneEach) {
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Push('a', 4096));
  ASSERT_TRUE(Push('b', kMiB));
  EXPECT_EQ(Take(), "ab" + std::string(62, 'a'));
}

// It neither waits for those of the others nor may it catch up.
TEST_F(DepartureQueueTest, ATenantThatComesLaterTakesTurnsAtOnce) {
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Push('a'));
  EXPECT_EQ(Take(), std::string(64, 'a'));
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Push('b'));
  EXPECT_EQ(Take(), "babababa" + std::string(32, 'a'));
}

TEST_F(DepartureQueueTest, ABatchEndsWithTheFragmentThatReachesItsBytes) {
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Push('a', 30 * kMiB));
  EXPECT_EQ(Take(), "aaa");
  EXPECT_EQ(Take(), "a");
  EXPECT_EQ(Take(), "");
}

TEST_F(DepartureQueueTest, KnowsWhetherEarlierFragmentsWait) {
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Push('a'));
  const uint64_t before_b = queue_.end();
  ASSERT_TRUE(Push('b'));
  const uint64_t end = queue_.end();
  EXPECT_FALSE(queue_.HasBefore("b", before_b));
  EXPECT_TRUE(queue_.HasBefore("b", end));
  EXPECT_FALSE(queue_.HasBefore("c", end));
  ASSERT_EQ(Take(), "ab" + std::string(62, 'a'));
  EXPECT_FALSE(queue_.HasBefore("b", end)) << "it was taken before others that came earlier";
  ASSERT_TRUE(Push('b'));
  EXPECT_FALSE(queue_.HasBefore("b", end)) << "it came later";
  EXPECT_TRUE(queue_.HasBefore("a", end));
  EXPECT_TRUE(queue_.HasBefore(end));
  ASSERT_EQ(Take().size(), 38u);
  EXPECT_FALSE(queue_.HasBefore(end));
}

TEST_F(DepartureQueueTest, TakesAll) {
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Push('a'));
  ASSERT_TRUE(Push('b'));
  EXPECT_EQ(queue_.TakeAll().size(), 101u);
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(queue_.bytes(), 0u);
  EXPECT_FALSE(queue_.HasBefore(queue_.end()));
}

TEST(DepartureQueueOfAllTest, WithoutTenantsItIsOneQueueInOrder) {
  DepartureQueue queue({.fragments_max = 100, .bytes_max = 1000});
  const auto push = [&](const std::string& tenant, PageHandle page) {
    Departure departure;
    departure.page = page;
    departure.meta.bytes = 10;
    return queue.Push(tenant, departure);
  };
  for (PageHandle page = 0; page < 100; ++page) {
    ASSERT_TRUE(push(page % 7 == 0 ? "b" : "a", page)) << page;
  }
  EXPECT_FALSE(push("c", 100));
  const std::vector<Departure> all = queue.TakeAll();
  ASSERT_EQ(all.size(), 100u);
  for (PageHandle page = 0; page < 100; ++page) EXPECT_EQ(all[page].page, page);
}

}  // namespace
}  // namespace crumb::storage
