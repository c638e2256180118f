// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/ghost_list.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>

namespace crumb::storage {
namespace {

TEST(GhostListTest, OldestGivesWay) {
  GhostList ghosts(2);
  EXPECT_FALSE(ghosts.Add({.fingerprint = 1, .epoch = 10, .uses = 5}).has_value());
  EXPECT_FALSE(ghosts.Add({.fingerprint = 2}).has_value());
  const std::optional<Ghost> dropped = ghosts.Add({.fingerprint = 3});
  ASSERT_TRUE(dropped.has_value());
  EXPECT_EQ(dropped->fingerprint, 1u);
  EXPECT_EQ(dropped->epoch, 10u);
  EXPECT_EQ(dropped->uses, 5u);
  EXPECT_FALSE(ghosts.Take(1).has_value());
  EXPECT_TRUE(ghosts.Take(2).has_value());
  EXPECT_FALSE(ghosts.Take(2).has_value());
  EXPECT_EQ(ghosts.size(), 1u);
}

TEST(GhostListTest, WithoutRoomReturnsWhatItGets) {
  GhostList ghosts(0);
  EXPECT_EQ(ghosts.Add({.fingerprint = 4})->fingerprint, 4u);
  EXPECT_EQ(ghosts.size(), 0u);
}

// Against a list that is searched. Places of ghosts that were taken stay used up until they are
// the oldest, so the model keeps them too.
TEST(GhostListTest, AgreesWithASearchedList) {
  constexpr size_t kMax = 20;
  constexpr uint64_t kSeed = 99;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  struct Place {
    uint64_t fingerprint;
    bool live;
  };
  std::mt19937_64 random(kSeed);
  std::deque<Place> model;
  GhostList ghosts(kMax);
  for (int step = 0; step < 20000; ++step) {
    const uint64_t fingerprint = random() % 40;
    bool known = false;
    for (Place& place : model) {
      if (!place.live || place.fingerprint != fingerprint) continue;
      known = true;
      place.live = false;
    }
    ASSERT_EQ(ghosts.Take(fingerprint).has_value(), known) << step;
    if (random() % 3 == 0) continue;
    bool drops = false;
    if (model.size() == kMax) {
      drops = model.front().live;
      model.pop_front();
    }
    model.push_back({fingerprint, true});
    ASSERT_EQ(ghosts.Add({.fingerprint = fingerprint}).has_value(), drops) << step;
  }
}

}  // namespace
}  // namespace crumb::storage
