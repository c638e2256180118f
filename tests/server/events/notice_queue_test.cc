// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/events/notice_queue.h"

#include <memory>
#include <optional>
#include <string>
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

TEST_F(NoticeQueueTest, AFullQueueTakesNothingAndWakesNoReader) {
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

TEST_F(NoticeQueueTest, TheNewestStateOfAKeyspaceReplacesTheOneThatWaits) {
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_TRUE(queue_.AddStateChange({.keyspace = Space(1),
                                       .state = KeyspaceState::kActive,
                                       .reason = std::to_string(i),
                                       .generation = 200 - i}));
  }
  EXPECT_TRUE(queue_.AddSlabGone(7));
  EXPECT_TRUE(queue_.AddStateChange({.keyspace = Space(2), .state = {}, .reason = "other"}));
  EXPECT_TRUE(queue_.AddStateChange(
      {.keyspace = Space(1), .state = KeyspaceState::kBf16, .reason = "last", .generation = 3}));
  EXPECT_EQ(wakes_, 3) << "one for each notice";
  const auto newest = std::get<NoticeQueue::StateChange>(*queue_.Take());
  EXPECT_EQ(newest.reason, "last");
  EXPECT_EQ(newest.state, KeyspaceState::kBf16);
  EXPECT_EQ(newest.generation, 200u) << "what was dropped stays dropped";
  EXPECT_EQ(std::get<NoticeQueue::SlabGone>(*queue_.Take()).slab, 7u);
  EXPECT_EQ(std::get<NoticeQueue::StateChange>(*queue_.Take()).reason, "other");
  EXPECT_FALSE(queue_.Take().has_value());
  EXPECT_TRUE(queue_.AddStateChange({.keyspace = Space(1), .state = {}, .reason = "again"}));
  EXPECT_EQ(std::get<NoticeQueue::StateChange>(*queue_.Take()).reason, "again");
}

// Queues of two tenants that share one budget of bytes.
class NoticeBytesTest : public testing::Test {
 protected:
  static NoticeQueue::StateChange Change(uint8_t keyspace, size_t reason_bytes) {
    return {.keyspace = Space(keyspace), .state = {}, .reason = std::string(reason_bytes, 'r')};
  }

  TenantBudget bytes_{40'000, 50};
  std::optional<NoticeQueue> queue_{std::in_place, size_t{65'536}, [] {}, "a", &bytes_};
};

TEST_F(NoticeBytesTest, TheMemoryOfATenantsNoticesIsBounded) {
  NoticeQueue second(
      65'536, [] {}, "a", &bytes_);
  uint64_t added = 0;
  for (int i = 0; i < 256; ++i) {
    added += queue_->AddStateChange(Change(static_cast<uint8_t>(i), 512)) ? 1 : 0;
    added += second.AddDurable(Space(static_cast<uint8_t>(i)), Key(1));
    added += second.AddSlabGone(static_cast<uint32_t>(i)) ? 1 : 0;
  }
  EXPECT_LE(bytes_.used(), 20'000u) << "a half for each tenant that comes";
  EXPECT_GT(bytes_.used(), 19'000u);
  EXPECT_LT(added, 120u);
  EXPECT_GT(added, 40u);
  NoticeQueue other(
      65'536, [] {}, "b", &bytes_);
  EXPECT_TRUE(other.AddStateChange(Change(1, 512))) << "another tenant has room";
}

TEST_F(NoticeBytesTest, AStateIsNotLostForWantOfRoomForItsReason) {
  ASSERT_TRUE(queue_->AddStateChange(Change(1, 10)));
  while (queue_->AddDurable(Space(1), Key(1)) == 1) {
  }
  NoticeQueue::StateChange newest = Change(1, 512);
  newest.state = KeyspaceState::kBf16;
  EXPECT_TRUE(queue_->AddStateChange(newest));
  const auto change = std::get<NoticeQueue::StateChange>(*queue_->Take());
  EXPECT_EQ(change.state, KeyspaceState::kBf16);
  EXPECT_EQ(change.reason, "");
}

TEST_F(NoticeBytesTest, BytesComeBackWithTheNoticesAndTheQueue) {
  const auto fill = [&] {
    EXPECT_TRUE(queue_->AddStateChange(Change(1, 100)));
    EXPECT_TRUE(queue_->AddStateChange(Change(1, 50)));
    EXPECT_TRUE(queue_->AddStateChange(Change(1, 200)));
    EXPECT_EQ(queue_->AddDurable(Space(1), Key(1), 100), 100u);
    EXPECT_TRUE(queue_->AddSlabGone(1));
    NoticeQueue::Demotions demotions;
    demotions.work.resize(3);
    demotions.work[0].header = std::make_shared<const FragmentHeader>();
    EXPECT_TRUE(queue_->AddDemotions(demotions));
    EXPECT_GT(bytes_.used(), 3'000u);
  };
  fill();
  while (queue_->Take().has_value()) {
  }
  EXPECT_EQ(bytes_.used(), 0u);
  fill();
  queue_.reset();
  EXPECT_EQ(bytes_.used(), 0u);
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
