// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/events/event_hub.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "common/crc32c.h"
#include "gtest/gtest.h"
#include "tests/common/eventually.h"
#include "tests/server/memory_store.h"

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
  return {storage::PageEvent::Kind::kAdded, keyspace, Key(key), Tier::kHost};
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

TEST_F(EventHubTest, ASlowWatcherIsNotifiedOnceThatEventsAreMissing) {
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

// Over a store whose pages become durable when they are flushed.
class DurableWaitsTest : public EventHubTest {
 protected:
  DurableWaitsTest() { hub_.SetStore(&store_); }

  // Commits a page of one tile, for the first time or again.
  FragmentHeader Commit(int key) {
    const std::vector<std::byte> tile(64);
    FragmentHeader header;
    header.tile_bytes = static_cast<uint32_t>(tile.size());
    header.generation = 1;
    header.keyspace = Space(1);
    header.key = Key(key);
    header.range = {{0, 1}, {0, 1}};
    header.tile_sums = {Crc32c(tile)};
    EXPECT_TRUE(store_.Commit({.header = header, .tiles = tile}).ok());
    return header;
  }
  void Flush() {
    store_.Flush({}, std::nullopt, [](const FlushReport&) {});
  }
  static size_t KeysOf(NoticeQueue& notices) {
    const auto notice = notices.Take();
    return notice ? std::get<NoticeQueue::Durable>(*notice).keys.size() : 0;
  }

  MemoryStore store_{
      16,
      4096,
      {[this](const KeyspaceId& keyspace, const PageKey& key) { hub_.SettleWaits(keyspace, key); },
       [this](const storage::PageEvent& event) { hub_.Publish(event); }}};
};

TEST_F(DurableWaitsTest, EveryWriterOfAPageIsNotifiedOnce) {
  const auto first = std::make_shared<NoticeQueue>(10, [this] { ++woken_; });
  const auto second = std::make_shared<NoticeQueue>(10, [] {});
  hub_.AwaitDurable(Commit(1), first);
  hub_.AwaitDurable(Commit(1), second);  // a duplicate
  hub_.AwaitDurable(Commit(2), first);
  EXPECT_EQ(KeysOf(*first), 0u);
  Flush();
  Flush();
  EXPECT_EQ(woken_, 2);
  EXPECT_EQ(KeysOf(*first), 2u);
  EXPECT_EQ(KeysOf(*second), 1u);
  EXPECT_EQ(KeysOf(*first), 0u);
  hub_.AwaitDurable(Commit(1), second);
  EXPECT_EQ(KeysOf(*second), 1u) << "it is durable already";
}

TEST_F(DurableWaitsTest, WaitsAndNoticesAreBounded) {
  auto notices = std::make_shared<NoticeQueue>(2, [] {});
  for (int i = 0; i < 5; ++i) hub_.AwaitDurable(Commit(i), notices);
  EXPECT_EQ(metrics_.notices_dropped.value(), 2u);
  Flush();
  EXPECT_EQ(metrics_.notices_dropped.value(), 3u);
  EXPECT_EQ(KeysOf(*notices), 2u);
  EXPECT_TRUE(notices->AddStateChange({Space(1), KeyspaceState::kBf16, "why"}));
}

TEST_F(DurableWaitsTest, PagesThatAreGoneAndStreamsThatEndedTakeNoRoom) {
  auto ended = std::make_shared<NoticeQueue>(10, [this] { ++woken_; });
  const auto notices = std::make_shared<NoticeQueue>(10, [] {});
  for (int i = 0; i < 3; ++i) hub_.AwaitDurable(Commit(i), ended);
  ASSERT_TRUE(store_.Delete(Space(1), std::vector{Key(2)}).ok());
  hub_.AwaitDurable(Commit(3), notices);  // the room of the deleted page
  ended.reset();
  hub_.AwaitDurable(Commit(4), notices);  // the room of the ended stream
  Flush();
  EXPECT_EQ(metrics_.notices_dropped.value(), 0u);
  EXPECT_EQ(KeysOf(*notices), 2u);
  EXPECT_EQ(woken_, 0);
}

TEST_F(DurableWaitsTest, OneTenantTakesNeitherAllWatchersNorAllWaits) {
  EventHub hub({4, 4, 50}, metrics_);
  hub.SetStore(&store_);
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
  for (int i = 0; i < 4; ++i) hub.AwaitDurable(Commit(i), of_a);
  hub.AwaitDurable(Commit(10), of_b);
  EXPECT_EQ(metrics_.notices_dropped.value(), 2u) << "two of a's four waits are beyond its part";
  Flush();
  for (int i = 0; i < 4; ++i) hub.SettleWaits(Space(1), Key(i));
  hub.SettleWaits(Space(1), Key(10));
  EXPECT_EQ(KeysOf(*of_a), 2u);
  EXPECT_EQ(KeysOf(*of_b), 1u);
  hub.AwaitDurable(Commit(2), of_a);
  EXPECT_EQ(KeysOf(*of_a), 1u) << "waits that ended give their part back";
}

// Counts how often durability is looked up.
class CountingStore : public MemoryStore {
 public:
  using MemoryStore::MemoryStore;
  storage::Durability DurabilityOf(const KeyspaceId& keyspace, const PageKey& key,
                                   uint64_t generation, const TileRange& range) const override {
    ++looks;
    return MemoryStore::DurabilityOf(keyspace, key, generation, range);
  }
  mutable std::atomic<int> looks = 0;
};

class ManyWaitsTest : public DurableWaitsTest {
 protected:
  static constexpr int kCommits = 1000;

  ManyWaitsTest() { hub_.SetStore(&counting_); }
  FragmentHeader CommitCounted(int key) {
    const FragmentHeader header = Commit(key);
    const std::vector<std::byte> tile(64);
    EXPECT_TRUE(counting_.Commit({.header = header, .tiles = tile}).ok());
    return header;
  }

  EventHub hub_{{4, 100'000}, metrics_};
  CountingStore counting_{
      256,
      4096,
      {[this](const KeyspaceId& keyspace, const PageKey& key) { hub_.SettleWaits(keyspace, key); },
       [this](const storage::PageEvent& event) { hub_.Publish(event); }}};
};

TEST_F(ManyWaitsTest, CommitsOfOneFragmentCostOneLookEachAndGetOneNoticeEach) {
  const auto notices = std::make_shared<NoticeQueue>(kCommits, [] {});
  const FragmentHeader header = CommitCounted(1);
  for (int i = 0; i < kCommits; ++i) hub_.AwaitDurable(header, notices);
  counting_.Flush({}, std::nullopt, [](const FlushReport&) {});
  EXPECT_LE(counting_.looks, 2 * kCommits);
  EXPECT_EQ(KeysOf(*notices), static_cast<size_t>(kCommits));
  EXPECT_EQ(metrics_.notices_dropped.value(), 0u);
}

TEST_F(ManyWaitsTest, WaitsOfOnePageAreBounded) {
  EventHub hub({4, 100'000, 100, 10}, metrics_);
  hub.SetStore(&counting_);
  const auto notices = std::make_shared<NoticeQueue>(kCommits, [] {});
  FragmentHeader header = CommitCounted(1);
  for (int i = 0; i < 100; ++i) {
    header.range.layers = {0, static_cast<uint16_t>(i + 1)};  // another fragment each time
    hub.AwaitDurable(header, notices);
  }
  EXPECT_EQ(metrics_.notices_dropped.value(), 90u);
  hub.AwaitDurable(CommitCounted(2), notices);
  EXPECT_EQ(metrics_.notices_dropped.value(), 90u) << "another page has its own bound";
}

TEST_F(ManyWaitsTest, AnEndedStreamTakesNoNoticeFromItsTenant) {
  EventHub hub({4, kCommits, 50}, metrics_);
  hub.SetStore(&counting_);
  const auto stream = [](const std::string& tenant) {
    return std::make_shared<NoticeQueue>(
        kCommits, [] {}, tenant);
  };
  auto ended = stream("a");
  FragmentHeader header = CommitCounted(1);
  const auto await = [&](const std::shared_ptr<NoticeQueue>& notices, int fragment) {
    header.range.layers = {0, static_cast<uint16_t>(fragment % 100 + 1)};
    header.range.heads = {0, static_cast<uint16_t>(fragment / 100 + 1)};
    hub.AwaitDurable(header, notices);
  };
  const int part = kCommits / 2;
  for (int i = 0; i < part; ++i) await(ended, i);
  ASSERT_EQ(metrics_.notices_dropped.value(), 0u);
  await(ended, part);
  ASSERT_EQ(metrics_.notices_dropped.value(), 1u) << "a has its part";
  ended.reset();
  const auto next = stream("a");
  for (int i = 0; i < part; ++i) await(next, i);
  EXPECT_EQ(metrics_.notices_dropped.value(), 1u);
}

TEST_F(ManyWaitsTest, NoNoticeIsMissedWhilePagesBecomeDurable) {
  const auto notices = std::make_shared<NoticeQueue>(kCommits, [] {});
  std::atomic<bool> done = false;
  std::thread flusher([&] {
    while (!done) counting_.Flush({}, std::nullopt, [](const FlushReport&) {});
  });
  constexpr size_t kWriters = 4;
  for (int round = 0; round < 100; ++round) {
    const FragmentHeader header = CommitCounted(1);
    for (size_t i = 0; i < kWriters; ++i) hub_.AwaitDurable(header, notices);
    size_t received = 0;
    EXPECT_TRUE(Eventually([&] { return (received += KeysOf(*notices)) == kWriters; })) << received;
    EXPECT_TRUE(counting_.Delete(Space(1), std::vector{Key(1)}).ok());
  }
  done = true;
  flusher.join();
}

}  // namespace
}  // namespace crumb::server
