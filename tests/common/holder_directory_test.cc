// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// HolderDirectory: which holders a node is referred to, which entries are dropped when it is full,
// and that ranges of tiles give the results of sets of single tiles.
#include "common/holder_directory.h"

#include <gmock/gmock.h>

#include <bitset>
#include <map>
#include <random>

#include "common/placement.h"
#include "common/sha256.h"

namespace crumb {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr TileRange kAll = {{0, 4}, {0, 8}};

PageKey Key(int number) {
  PageKey key;
  key.bytes = Sha256("page " + std::to_string(number));
  return key;
}

std::vector<PageKey> KeysFrom(int first, int count) {
  std::vector<PageKey> keys;
  for (int i = first; i < first + count; ++i) keys.push_back(Key(i));
  return keys;
}

KeyspaceId KeyspaceOf(const std::string& name) {
  KeyspaceId id;
  id.bytes = Sha256(name);
  return id;
}

class HolderDirectoryTest : public testing::Test {
 protected:
  void Note(HolderDirectory& directory, const std::string& node, int first, int count,
            const TileRange& range = kAll, uint64_t generation = 1,
            const std::string& tenant = "") {
    HolderDirectory::Offer offer;
    offer.node = node;
    offer.keyspace = KeyspaceOf("keyspace of " + tenant);
    offer.tenant = tenant;
    offer.generation = generation;
    offer.range = range;
    offer.keys = KeysFrom(first, count);
    offer.tile_bytes.assign(offer.keys.size(), 512);
    offer.session.fill(static_cast<uint8_t>(node.front()));
    directory.Note(offer);
  }

  std::optional<HolderDirectory::Referral> Refer(HolderDirectory& directory,
                                                 const std::string& requester, int first, int count,
                                                 size_t own_pages = 0,
                                                 const TileRange& range = kAll,
                                                 uint64_t generation = 1,
                                                 const std::string& tenant = "") {
    const std::vector<PageKey> keys = KeysFrom(first, count);
    HolderDirectory::Query request;
    request.requester = requester;
    request.keyspace = KeyspaceOf("keyspace of " + tenant);
    request.generation = generation;
    request.range = range;
    request.keys = keys;
    request.own_pages = own_pages;
    return directory.Refer(request);
  }

  // The first node of the referral; empty: there is none.
  std::string First(HolderDirectory& directory, const std::string& requester, int first, int count,
                    size_t own_pages = 0, const TileRange& range = kAll) {
    const auto referral = Refer(directory, requester, first, count, own_pages, range);
    return referral ? referral->nodes.front() : "";
  }

  HolderDirectory directory_{1000};
};

TEST_F(HolderDirectoryTest, ARequesterIsReferredToTheHolderOfTheDeepestPage) {
  EXPECT_FALSE(Refer(directory_, "reader", 0, 4));
  Note(directory_, "a", 0, 2);
  Note(directory_, "b", 0, 3);
  const auto referral = Refer(directory_, "reader", 0, 4);
  ASSERT_TRUE(referral);
  EXPECT_EQ(referral->pages, 3u);
  EXPECT_THAT(referral->nodes, ElementsAre("b"));
  // No node is referred to itself.
  EXPECT_EQ(Refer(directory_, "b", 0, 4)->pages, 2u);
  EXPECT_THAT(Refer(directory_, "b", 0, 4)->nodes, ElementsAre("a"));
  EXPECT_EQ(directory_.pages(), 3u);
}

TEST_F(HolderDirectoryTest, ReadersAreSpreadEvenlyOverHolders) {
  for (const char* node : {"a", "b", "c"}) Note(directory_, node, 0, 2);
  std::map<std::string, int> served;
  for (int i = 0; i < 30; ++i) ++served[First(directory_, "reader", 0, 2)];
  EXPECT_EQ(served, (std::map<std::string, int>{{"a", 10}, {"b", 10}, {"c", 10}}));
  // This node is a holder like the others: it catches up with them, then each of the four has
  // every fourth reader.
  std::map<std::string, int> with_self;
  for (int i = 0; i < 50; ++i) ++with_self[First(directory_, "reader", 0, 2, 2)];
  EXPECT_EQ(with_self, (std::map<std::string, int>{{"", 20}, {"a", 10}, {"b", 10}, {"c", 10}}));
}

// The home of a run that all prompts share has pages of each; none of them is read often.
TEST_F(HolderDirectoryTest, ManyPagesThatAreReadOnceAreSpreadToo) {
  for (int page = 0; page < 40; ++page) {
    Note(directory_, std::string(1, static_cast<char>('a' + page % 4)), page, 1);
  }
  int own = 0;
  for (int page = 0; page < 40; ++page) own += First(directory_, "reader", page, 1, 1).empty();
  EXPECT_EQ(own, 8);  // five nodes share the 40 pages
}

TEST_F(HolderDirectoryTest, ThisNodeServesWhatItHasMoreOf) {
  Note(directory_, "a", 0, 2);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(First(directory_, "reader", 0, 4, 3), "");
  for (int i = 0; i < 5; ++i) EXPECT_EQ(First(directory_, "reader", 0, 4, 1), "a");
}

TEST_F(HolderDirectoryTest, ANewHolderTakesTheNextReadersAndTheBusiestMakesRoom) {
  for (size_t i = 0; i < HolderDirectory::kHoldersMax; ++i) {
    Note(directory_, std::string(1, static_cast<char>('a' + i)), 0, 1);
  }
  // "a" serves all.
  for (char node = 'b'; node < 'i'; ++node) {
    directory_.Forget(std::string(1, node), KeyspaceOf("keyspace of "), KeysFrom(0, 1));
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(First(directory_, "reader", 0, 1), "a");
  for (char node = 'b'; node < 'i'; ++node) Note(directory_, std::string(1, node), 0, 1);
  Note(directory_, "z", 0, 1);
  std::map<std::string, int> served;
  for (int i = 0; i < 16; ++i) ++served[First(directory_, "reader", 0, 1)];
  EXPECT_EQ(served.count("a"), 0u);
  EXPECT_EQ(served["z"], 2);
  EXPECT_THAT(served, SizeIs(8));
  EXPECT_THAT(Refer(directory_, "reader", 0, 1)->nodes, SizeIs(3));
}

TEST_F(HolderDirectoryTest, WhatAHolderWasFoundToLackIsForgotten) {
  Note(directory_, "a", 0, 4);
  directory_.Forget("a", KeyspaceOf("keyspace of "), KeysFrom(2, 2));
  EXPECT_EQ(Refer(directory_, "reader", 0, 4)->pages, 2u);
  EXPECT_EQ(directory_.pages(), 2u);
  directory_.Forget("stranger", KeyspaceOf("keyspace of "), KeysFrom(0, 2));
  directory_.Forget("a", KeyspaceOf("another"), KeysFrom(0, 2));
  EXPECT_EQ(directory_.pages(), 2u);
  directory_.ForgetPages(KeyspaceOf("keyspace of "), KeysFrom(0, 4));
  EXPECT_EQ(directory_.pages(), 0u);
}

TEST_F(HolderDirectoryTest, NodesThatHaveLeftAreNotReferredTo) {
  Note(directory_, "a", 0, 2);
  Note(directory_, "b", 0, 1);
  directory_.ForgetNode("a");
  EXPECT_EQ(Refer(directory_, "reader", 0, 2)->pages, 1u);
  EXPECT_EQ(First(directory_, "reader", 0, 2), "b");
  // A process that comes back under the same name holds the pages that it offers from then on.
  Note(directory_, "a", 1, 1);
  EXPECT_EQ(First(directory_, "reader", 0, 2), "a");
  EXPECT_EQ(First(directory_, "reader", 0, 1), "b");
}

TEST_F(HolderDirectoryTest, OlderGenerationsAreNotReferredTo) {
  Note(directory_, "a", 0, 2);
  EXPECT_FALSE(Refer(directory_, "reader", 0, 2, 0, kAll, 2));
  Note(directory_, "b", 0, 1, kAll, 2);
  EXPECT_EQ(Refer(directory_, "reader", 0, 2, 0, kAll, 2)->pages, 1u);
  EXPECT_THAT(Refer(directory_, "reader", 0, 1, 0, kAll, 2)->nodes, ElementsAre("b"));
  // An offer that was late.
  Note(directory_, "c", 0, 1, kAll, 1);
  EXPECT_THAT(Refer(directory_, "reader", 0, 1, 0, kAll, 2)->nodes, ElementsAre("b"));
}

TEST_F(HolderDirectoryTest, KeyspacesAreApart) {
  Note(directory_, "a", 0, 1, kAll, 1, "tenant-1");
  EXPECT_FALSE(Refer(directory_, "reader", 0, 1, 0, kAll, 1, "tenant-2"));
  EXPECT_TRUE(Refer(directory_, "reader", 0, 1, 0, kAll, 1, "tenant-1"));
}

TEST_F(HolderDirectoryTest, RanksOfOneNodeMakeAWholePage) {
  for (const uint16_t head : {0, 2, 4, 6, 1, 3, 5}) {
    Note(directory_, "a", 0, 1, {{0, 4}, {head, static_cast<uint16_t>(head + 1)}});
    EXPECT_EQ(First(directory_, "reader", 0, 1), "");
    EXPECT_EQ(First(directory_, "reader", 0, 1, 0, {{1, 3}, {head, uint16_t(head + 1)}}), "a");
  }
  Note(directory_, "a", 0, 1, {{0, 4}, {7, 8}});
  EXPECT_EQ(First(directory_, "reader", 0, 1), "a");
  EXPECT_THAT(directory_.PartsOf(KeyspaceOf("keyspace of "), 1, Key(0)), IsEmpty());
}

TEST_F(HolderDirectoryTest, PartsOfSeveralNodesAreReported) {
  Note(directory_, "a", 0, 1, {{0, 4}, {0, 4}});
  EXPECT_THAT(directory_.PartsOf(KeyspaceOf("keyspace of "), 1, Key(0)), IsEmpty());
  Note(directory_, "b", 0, 1, {{0, 4}, {4, 8}});
  const auto parts = directory_.PartsOf(KeyspaceOf("keyspace of "), 1, Key(0));
  ASSERT_THAT(parts, SizeIs(2));
  EXPECT_EQ(parts[0].node, "a");
  EXPECT_EQ(parts[0].session[0], 'a');
  EXPECT_EQ(parts[1].range, (TileRange{{0, 4}, {4, 8}}));
  EXPECT_EQ(parts[1].tile_bytes, 512u);
  Note(directory_, "c", 0, 1);
  EXPECT_THAT(directory_.PartsOf(KeyspaceOf("keyspace of "), 1, Key(0)), IsEmpty());
}

// Against a set of single tiles.
TEST_F(HolderDirectoryTest, CoverageIsThatOfSingleTiles) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto range_of = [&](uint16_t end) {
    const auto a = static_cast<uint16_t>(random() % end);
    const auto b = static_cast<uint16_t>(a + 1 + random() % (end - a));
    return IndexRange{a, b};
  };
  int covered = 0;
  for (int round = 0; round < 2000; ++round) {
    HolderDirectory directory(4);
    std::bitset<32> tiles;
    const auto each = [](const TileRange& range, const auto& visit) {
      for (int layer = range.layers.begin; layer < range.layers.end; ++layer) {
        for (int head = range.heads.begin; head < range.heads.end; ++head) visit(layer * 8 + head);
      }
    };
    // The maximum number of ranges, none of which touches another.
    for (size_t i = 0; i < HolderDirectory::kRangesMax; ++i) {
      const TileRange range = {range_of(4), range_of(8)};
      Note(directory, "a", 0, 1, range);
      each(range, [&](int tile) { tiles.set(static_cast<size_t>(tile)); });
      const TileRange wanted = {range_of(4), range_of(8)};
      bool expected = true;
      each(wanted, [&](int tile) { expected &= tiles.test(static_cast<size_t>(tile)); });
      ASSERT_EQ(First(directory, "reader", 0, 1, 0, wanted) == "a", expected) << round;
      covered += expected;
    }
  }
  EXPECT_GT(covered, 1000);
}

TEST_F(HolderDirectoryTest, MoreRangesThanAreRememberedCostAMissAndNoMore) {
  for (uint16_t i = 0; i < 40; ++i) {
    const auto layer = static_cast<uint16_t>(2 * i);
    Note(directory_, "a", 0, 1, {{layer, static_cast<uint16_t>(layer + 1)}, {0, 8}});
  }
  EXPECT_EQ(First(directory_, "reader", 0, 1, 0, {{78, 79}, {0, 8}}), "a");
  EXPECT_EQ(First(directory_, "reader", 0, 1, 0, {{0, 1}, {0, 8}}), "");
}

TEST_F(HolderDirectoryTest, RoomIsBoundedAndTheLeastRecentlyUsedGoes) {
  HolderDirectory small(4);
  Note(small, "a", 0, 4);
  EXPECT_EQ(First(small, "reader", 0, 1), "a");  // page 0 was used last
  Note(small, "a", 10, 3);
  EXPECT_EQ(small.pages(), 4u);
  EXPECT_EQ(small.evicted(), 3u);
  EXPECT_EQ(First(small, "reader", 0, 1), "a");
  for (int page = 1; page < 4; ++page) EXPECT_EQ(First(small, "reader", page, 1), "");
}

TEST_F(HolderDirectoryTest, NeitherANodeNorATenantThatFloodsItTakesOthersPages) {
  HolderDirectory small(100);
  Note(small, "honest", 0, 20, kAll, 1, "tenant");
  Note(small, "hostile", 1000, 5000, kAll, 1, "tenant");
  EXPECT_EQ(small.pages(), 100u);
  EXPECT_EQ(Refer(small, "reader", 0, 20, 0, kAll, 1, "tenant")->pages, 20u);
  // A tenant that invents keyspaces on every node loses its own pages.
  for (const char* node : {"honest", "other"}) Note(small, node, 7000, 5000, kAll, 1, "flood");
  EXPECT_EQ(small.pages(), 100u);
  EXPECT_EQ(Refer(small, "reader", 0, 20, 0, kAll, 1, "tenant")->pages, 20u);
  // Nodes that are gone make room first.
  small.ForgetNode("hostile");
  Note(small, "late", 20'000, 30, kAll, 1, "tenant");
  EXPECT_EQ(Refer(small, "reader", 20'000, 30, 0, kAll, 1, "tenant")->pages, 30u);
  HolderDirectory none(0);
  Note(none, "a", 0, 1);
  EXPECT_EQ(none.pages(), 0u);
}

TEST_F(HolderDirectoryTest, NoMoreKeysThanARunHasAreLookedAt) {
  Note(directory_, "a", 0, 100);
  EXPECT_EQ(Refer(directory_, "reader", 0, 100)->pages, kRunPages);
}

}  // namespace
}  // namespace crumb
