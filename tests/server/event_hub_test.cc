// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/event_hub.h"

#include <cstring>

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

PageKey Key(int number) {
  PageKey key;
  std::memcpy(key.bytes.data(), &number, sizeof(number));
  return key;
}

KeyspaceId Space(uint8_t number) {
  KeyspaceId id;
  id.bytes[0] = number;
  return id;
}

storage::PageEvent Added(const KeyspaceId& keyspace, int key) {
  return {storage::PageEvent::Kind::kAdded, keyspace, Key(key), storage::Tier::kHost};
}

class EventHubTest : public testing::Test {
 protected:
  std::shared_ptr<WatchQueue> Watch(const KeyspaceId& keyspace, size_t events_max) {
    auto queue = std::make_shared<WatchQueue>(events_max, [this] { ++woken_; });
    EXPECT_TRUE(hub_.Watch("", keyspace, queue, sequence_).ok());
    return queue;
  }

  ServerMetrics metrics_{1};
  EventHub hub_{{2, 3}, metrics_};
  uint64_t sequence_ = 0;
  int woken_ = 0;
};

TEST_F(EventHubTest, WatchersGetTheirKeyspacesEventsInOrder) {
  hub_.Publish(Added(Space(1), 1));
  const auto queue = Watch(Space(1), 100);
  EXPECT_EQ(sequence_, 1u);
  hub_.Publish(Added(Space(1), 2));
  hub_.Publish(Added(Space(2), 3));
  hub_.Publish(Added(Space(1), 4));
  auto item = queue->Take();
  ASSERT_TRUE(item.has_value());
  EXPECT_EQ(item->sequence, 2u);
  EXPECT_EQ(item->event.key, Key(2));
  item = queue->Take();
  ASSERT_TRUE(item.has_value());
  EXPECT_EQ(item->sequence, 4u);
  EXPECT_FALSE(queue->Take().has_value());
  EXPECT_EQ(woken_, 2);
}

TEST_F(EventHubTest, ASlowWatcherIsToldOnceThatEventsAreMissing) {
  const auto queue = Watch(Space(1), 3);
  for (int i = 0; i < 10; ++i) hub_.Publish(Added(Space(1), i));
  EXPECT_EQ(metrics_.events_lost.value(), 7u);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(queue->Take()->lost);
  EXPECT_TRUE(queue->Take()->lost);
  EXPECT_FALSE(queue->Take().has_value());
  hub_.Publish(Added(Space(1), 11));
  EXPECT_EQ(queue->Take()->event.key, Key(11));
}

TEST_F(EventHubTest, WatchersAreBoundedAndGoneOnesMakeRoom) {
  auto first = Watch(Space(1), 3);
  const auto second = Watch(Space(1), 3);
  const auto third = std::make_shared<WatchQueue>(3, [] {});
  EXPECT_TRUE(absl::IsResourceExhausted(hub_.Watch("", Space(1), third, sequence_)));
  first.reset();
  EXPECT_EQ(hub_.watchers(), 1u);
  EXPECT_TRUE(hub_.Watch("", Space(1), third, sequence_).ok());
}

TEST_F(EventHubTest, DurabilityGoesToWhoWaitsOnce) {
  const auto notices = std::make_shared<NoticeQueue>(10, [this] { ++woken_; });
  hub_.AwaitDurable(Key(1), notices);
  hub_.AwaitDurable(Key(2), notices);
  hub_.ForgetDurable(Key(2));
  for (int i = 0; i < 2; ++i) {
    hub_.OnDurable(Space(1), Key(1));
    hub_.OnDurable(Space(1), Key(2));
  }
  EXPECT_EQ(woken_, 1);
  const auto notice = notices->Take();
  ASSERT_TRUE(notice.has_value());
  EXPECT_EQ(std::get<NoticeQueue::Durable>(*notice).keys.size(), 1u);
  EXPECT_FALSE(notices->Take().has_value());
}

TEST_F(EventHubTest, WaitsAndNoticesAreBounded) {
  const auto notices = std::make_shared<NoticeQueue>(2, [] {});
  for (int i = 0; i < 5; ++i) hub_.AwaitDurable(Key(i), notices);
  EXPECT_EQ(metrics_.notices_dropped.value(), 2u);
  for (int i = 0; i < 5; ++i) hub_.OnDurable(Space(1), Key(i));
  EXPECT_EQ(metrics_.notices_dropped.value(), 3u);
  EXPECT_EQ(std::get<NoticeQueue::Durable>(*notices->Take()).keys.size(), 2u);
  EXPECT_TRUE(notices->AddStateChange({Space(1), ServingState::kBf16, "why"}));
}

TEST_F(EventHubTest, AStreamThatEndedIsNotTold) {
  auto notices = std::make_shared<NoticeQueue>(10, [this] { ++woken_; });
  hub_.AwaitDurable(Key(1), notices);
  notices.reset();
  hub_.OnDurable(Space(1), Key(1));
  EXPECT_EQ(woken_, 0);
}

TEST_F(EventHubTest, OneTenantTakesNeitherAllWatchersNorAllWaits) {
  EventHub hub({4, 4, 50}, metrics_);
  std::vector<std::shared_ptr<WatchQueue>> queues;
  const auto watch = [&](const std::string& tenant) {
    queues.push_back(std::make_shared<WatchQueue>(1, [] {}));
    return hub.Watch(tenant, Space(1), queues.back(), sequence_).ok();
  };
  EXPECT_TRUE(watch("a"));
  EXPECT_TRUE(watch("a"));
  EXPECT_FALSE(watch("a"));
  EXPECT_TRUE(watch("b"));
  EXPECT_EQ(metrics_.part_rejected[static_cast<size_t>(Rejection::kWatchers)].value(), 1u);
  const auto of_a = std::make_shared<NoticeQueue>(
      10, [] {}, "a");
  const auto of_b = std::make_shared<NoticeQueue>(
      10, [] {}, "b");
  for (int i = 0; i < 4; ++i) hub.AwaitDurable(Key(i), of_a);
  hub.AwaitDurable(Key(10), of_b);
  EXPECT_EQ(metrics_.notices_dropped.value(), 2u);
  hub.OnDurable(Space(1), Key(10));
  EXPECT_TRUE(of_b->Take().has_value());
  hub.ForgetDurable(Key(0));
  hub.AwaitDurable(Key(2), of_a);
  hub.OnDurable(Space(1), Key(2));
  EXPECT_TRUE(of_a->Take().has_value());
}

}  // namespace
}  // namespace crumb::server
