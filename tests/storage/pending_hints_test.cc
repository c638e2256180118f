// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/pending_hints.h"

#include "gtest/gtest.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {
namespace {

TEST(PendingHints, EndByThemselves) {
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), 100);
  const PageKey key = SampleKey(1, 1);
  hints.Set(SampleKeyspace(0), std::span(&key, 1));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), key));
  EXPECT_FALSE(hints.Has(SampleKeyspace(1), key));
  clock.Advance(std::chrono::seconds(6));
  hints.Set(SampleKeyspace(0), std::span(&key, 1));  // again
  clock.Advance(std::chrono::seconds(6));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), key));
  clock.Advance(std::chrono::seconds(5));
  EXPECT_FALSE(hints.Has(SampleKeyspace(0), key));
}

TEST(PendingHints, TheOldestMakeRoom) {
  FakeClock clock;
  PendingHints hints(clock, std::chrono::seconds(10), 3);
  for (uint64_t i = 0; i < 5; ++i) {
    const PageKey key = SampleKey(1, i);
    hints.Set(SampleKeyspace(0), std::span(&key, 1));
  }
  EXPECT_FALSE(hints.Has(SampleKeyspace(0), SampleKey(1, 1)));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), SampleKey(1, 2)));
  EXPECT_TRUE(hints.Has(SampleKeyspace(0), SampleKey(1, 4)));
}

}  // namespace
}  // namespace crumb::storage
