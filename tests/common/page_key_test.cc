// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/page_key.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "common/keyspace.h"

namespace crumb {
namespace {

std::vector<int32_t> Count(int n) {
  std::vector<int32_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

KeyspaceId ExampleKeyspace() {
  KeyspaceDescription description;
  EXPECT_TRUE(description.Set("model", "example").ok());
  EXPECT_TRUE(description.Set("layers", "4").ok());
  return description.Id();
}

// The vectors of docs/formats/page-key.md and keyspace.md, made there with Python's hashlib.
TEST(PageKeyTest, DocumentedVectors) {
  EXPECT_EQ(ExampleKeyspace().ToHex(),
            "e50ff50bed6cb545055e8a6b6a22f237fcb1db13544f7d345e9be70c18e17950");
  const auto keys = PageKeysOf(ExampleKeyspace(), Count(130));
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0].ToHex(), "a8715e2280e5421e1dc9acc269ecbcde53765018951cc046e2190f0757f1d1b6");
  EXPECT_EQ(keys[1].ToHex(), "1431e430a940426fcd25fac4428c488a8006006986702ddaffc3d196b997cd37");
  const std::vector<uint8_t> foreign = {1, 2, 3};
  EXPECT_EQ(ForeignPageKey(ExampleKeyspace(), foreign).ToHex(),
            "fe868c40de04d6c213bf1f0eb215caf4fc296215989beb4699cbca0f3903b781");
}

TEST(PageKeyTest, DependsOnAllTokensBefore) {
  auto tokens = Count(192);
  const auto keys = PageKeysOf(ExampleKeyspace(), tokens);
  tokens[0] = 7;
  const auto changed = PageKeysOf(ExampleKeyspace(), tokens);
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_NE(keys[i], changed[i]) << "page " << i;
}

TEST(PageKeyTest, DependsOnExtraAndKeyspace) {
  const auto tokens = Count(64);
  Digest salt{};
  salt[31] = 1;
  EXPECT_NE(PageKeyChain(ExampleKeyspace()).Next(tokens),
            PageKeyChain(ExampleKeyspace()).Next(tokens, salt));
  EXPECT_NE(PageKeyChain(ExampleKeyspace()).Next(tokens), PageKeyChain(KeyspaceId{}).Next(tokens));
}

TEST(PageKeyTest, NegativeTokensAreTwosComplement) {
  std::vector<int32_t> tokens(64, -1);
  EXPECT_NE(PageKeysOf(ExampleKeyspace(), tokens),
            PageKeysOf(ExampleKeyspace(), std::vector<int32_t>(64, 1)));
}

TEST(PageKeyTest, TextForms) {
  const PageKey key = PageKeysOf(ExampleKeyspace(), Count(64))[0];
  EXPECT_EQ(*PageKey::FromHex(key.ToHex()), key);
  EXPECT_EQ(*PageKey::FromBytes(key.view()), key);
  EXPECT_EQ(PageKey::FromHex(key.ToHex().substr(1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PageKey::FromHex(std::string(64, 'g')).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PageKey::FromBytes("short").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(KeyspaceTest, OrderOfSettingDoesNotMatter) {
  KeyspaceDescription a;
  ASSERT_TRUE(a.Set("x", "1").ok());
  ASSERT_TRUE(a.Set("a", "2").ok());
  KeyspaceDescription b;
  ASSERT_TRUE(b.Set("a", "2").ok());
  ASSERT_TRUE(b.Set("x", "1").ok());
  EXPECT_EQ(a.Canonical(), "a=2\nx=1\n");
  EXPECT_EQ(a.Id(), b.Id());
}

TEST(KeyspaceTest, RefusesWhatCouldForgeALine) {
  KeyspaceDescription description;
  EXPECT_FALSE(description.Set("", "1").ok());
  EXPECT_FALSE(description.Set("a=b", "1").ok());
  EXPECT_FALSE(description.Set("a\nb", "1").ok());
  EXPECT_FALSE(description.Set("a", "1\nb=2").ok());
  EXPECT_TRUE(description.Set("a", "1=2").ok());
  EXPECT_FALSE(description.Set("a", "3").ok()) << "set twice";
}

}  // namespace
}  // namespace crumb
