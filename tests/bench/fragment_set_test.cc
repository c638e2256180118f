// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/fragment_set.h"

#include <gtest/gtest.h>

#include <set>

namespace crumb::bench {
namespace {

TEST(FragmentSetTest, FragmentsAreWhatCrumbdAccepts) {
  FragmentSet set("a", 128 << 10, 1 << 20, 16);
  KeyspaceId keyspace;
  keyspace.bytes.fill(9);
  set.BindKeyspace(keyspace, 4);
  std::set<PageKey> keys;
  for (size_t page = 0; page < 40; ++page) {
    const FragmentHeader header = set.Header(page);
    EXPECT_TRUE(VerifyTileSums(header, set.Tiles(page)).ok());
    EXPECT_EQ(header.keyspace, keyspace);
    EXPECT_EQ(header.generation, 4u);
    EXPECT_EQ(header.parent, page % 16 == 0 ? PageKey() : set.Key(page - 1));
    EXPECT_TRUE(keys.insert(header.key).second);
    std::vector<std::byte> encoded(set.fragment_bytes() - set.tiles_bytes());
    EncodeFragmentHeader(header, encoded);
    const auto decoded = DecodeFragmentHeader(encoded);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, header);
  }
}

TEST(FragmentSetTest, SizesAreWithinHalfATile) {
  for (const size_t wanted : {size_t{1}, size_t{128} << 10, size_t{1} << 20}) {
    const FragmentSet set("a", wanted, 1 << 20, 16);
    const size_t found = set.tiles_bytes();
    EXPECT_TRUE(found == 4608 || (found + 2304 >= wanted && found <= wanted + 2304)) << wanted;
    EXPECT_EQ(set.Spec().layers, static_cast<int>(found / 4608));
  }
}

TEST(FragmentSetTest, NamesSeparateKeysAndKeyspaces) {
  const FragmentSet a("a", 1 << 16, 1 << 20, 16), b("b", 1 << 16, 1 << 20, 16);
  EXPECT_NE(a.Key(0), b.Key(0));
  EXPECT_NE(a.Spec().fields, b.Spec().fields);
}

}  // namespace
}  // namespace crumb::bench
