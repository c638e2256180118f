// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/events/notice_queue.h"

#include <vector>

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

KeyspaceId Space(uint8_t number) {
  KeyspaceId id;
  id.bytes[0] = number;
  return id;
}

PageKey Key(uint8_t number) {
  PageKey key;
  key.bytes[0] = number;
  return key;
}

class NoticeQueueTest : public testing::Test {
 protected:
  int wakes_ = 0;
  NoticeQueue queue_{4, [this] { ++wakes_; }, "tenant"};
};

TEST_F(NoticeQueueTest, PagesOfOneKeyspaceThatFollowEachOtherAreOneNotice) {
  EXPECT_EQ(queue_.AddDurable(Space(1), Key(1)), 1u);
  EXPECT_EQ(queue_.AddDurable(Space(1), Key(2)), 1u);
  EXPECT_EQ(queue_.AddDurable(Space(2), Key(3)), 1u);
  EXPECT_EQ(queue_.AddDurable(Space(1), Key(4)), 1u);
  for (const std::vector<PageKey>& keys :
       {std::vector{Key(1), Key(2)}, std::vector{Key(3)}, std::vector{Key(4)}}) {
    const auto notice = queue_.Take();
    ASSERT_TRUE(notice.has_value());
    EXPECT_EQ(std::get<NoticeQueue::Durable>(*notice).keys, keys);
  }
  EXPECT_FALSE(queue_.Take().has_value());
  EXPECT_EQ(wakes_, 4);
}

TEST_F(NoticeQueueTest, KindsStayInOrder) {
  EXPECT_TRUE(queue_.AddStateChange({.keyspace = Space(1), .state = {}, .reason = "why"}));
  EXPECT_EQ(queue_.AddDurable(Space(1), Key(1)), 1u);
  EXPECT_TRUE(queue_.AddSlabGone(7));
  EXPECT_EQ(queue_.AddDurable(Space(1), Key(2)), 1u) << "a notice behind the slab's";
  EXPECT_EQ(std::get<NoticeQueue::StateChange>(*queue_.Take()).reason, "why");
  EXPECT_EQ(std::get<NoticeQueue::Durable>(*queue_.Take()).keys, std::vector{Key(1)});
  EXPECT_EQ(std::get<NoticeQueue::SlabGone>(*queue_.Take()).slab, 7u);
  EXPECT_EQ(std::get<NoticeQueue::Durable>(*queue_.Take()).keys, std::vector{Key(2)});
}

TEST_F(NoticeQueueTest, AFullQueueTakesNothingAndWakesNobody) {
  EXPECT_EQ(queue_.AddDurable(Space(1), Key(1), 6), 4u) << "each commit is a notice";
  EXPECT_EQ(wakes_, 1);
  EXPECT_EQ(queue_.AddDurable(Space(1), Key(2)), 0u);
  EXPECT_FALSE(queue_.AddStateChange({.keyspace = Space(1), .state = {}, .reason = ""}));
  EXPECT_FALSE(queue_.AddSlabGone(1));
  EXPECT_FALSE(queue_.AddDemotions({.pool = {}, .work = std::vector<storage::DemotionWork>(1)}));
  EXPECT_EQ(wakes_, 1);
  EXPECT_EQ(std::get<NoticeQueue::Durable>(*queue_.Take()).keys.size(), 4u);
  EXPECT_TRUE(queue_.AddSlabGone(1)) << "its room is free";
}

TEST_F(NoticeQueueTest, DemotionsTakeTheRoomOfTheirSlotsAndComeWholeOrNotAtAll) {
  const auto slots = [](size_t count) {
    return NoticeQueue::Demotions{.pool = {}, .work = std::vector<storage::DemotionWork>(count)};
  };
  EXPECT_TRUE(queue_.AddDemotions(slots(3)));
  EXPECT_FALSE(queue_.AddDemotions(slots(2)));
  EXPECT_TRUE(queue_.AddSlabGone(1));
  EXPECT_FALSE(queue_.AddSlabGone(2));
  EXPECT_EQ(std::get<NoticeQueue::Demotions>(*queue_.Take()).work.size(), 3u);
  EXPECT_TRUE(queue_.AddDemotions(slots(3)));
  EXPECT_FALSE(queue_.AddSlabGone(2));
}

TEST(NoticeQueueSizeTest, ANoticeIsBounded) {
  NoticeQueue queue(10'000, [] {});
  EXPECT_EQ(queue.AddDurable(Space(1), Key(1), 10'000), 10'000u);
  std::vector<size_t> sizes;
  while (const auto notice = queue.Take()) {
    sizes.push_back(std::get<NoticeQueue::Durable>(*notice).keys.size());
  }
  EXPECT_EQ(sizes, (std::vector<size_t>{4096, 4096, 1808}));
  EXPECT_EQ(queue.AddDurable(Space(1), Key(1), 10'001), 10'000u) << "all room is back";
}

}  // namespace
}  // namespace crumb::server
