// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/shadow_cache.h"

#include <gtest/gtest.h>

#include "storage/policy/policy.h"

namespace crumb::storage {
namespace {

size_t Access(ShadowCache& shadow, std::vector<uint64_t> chain) { return shadow.Access(chain); }

TEST(ShadowCacheTest, CountsHitsUpToTheFirstAbsent) {
  ShadowCache shadow(MakeLruPolicy(), 4);
  EXPECT_EQ(Access(shadow, {1, 2, 3}), 0u);
  EXPECT_EQ(Access(shadow, {1, 2, 4}), 2u);  // full: 1 2 4 3
  EXPECT_EQ(Access(shadow, {5}), 0u);        // 3 leaves
  EXPECT_EQ(Access(shadow, {1, 2, 3}), 2u);  // 4 leaves
  EXPECT_EQ(Access(shadow, {1, 2, 4}), 2u);
}

TEST(ShadowCacheTest, ForgottenItemsAreAbsent) {
  ShadowCache shadow(MakeLruPolicy(), 4);
  Access(shadow, {1, 2, 3});
  shadow.Forget(2);
  shadow.Forget(77);
  EXPECT_EQ(Access(shadow, {1, 2, 3}), 1u);
  EXPECT_EQ(Access(shadow, {1, 2, 3}), 3u);
}

}  // namespace
}  // namespace crumb::storage
