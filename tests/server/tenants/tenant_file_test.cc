// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/tenants/tenant_file.h"

#include <random>

#include "common/hex.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

std::string Sha(const std::string& token) { return HexEncode(Sha256(token)); }

std::string Error(const std::string& text) {
  const auto parsed = ParseTenants(text, "F", 3);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("F")) << text;
  return std::string(parsed.status().message());
}

// A file of one tenant "a" with these fields besides.
std::string One(const std::string& fields) {
  return "{\"tenants\": [{\"name\": \"a\", " + fields + "}]}";
}
std::string Token(const std::string& token) { return "\"token_sha256\": \"" + Sha(token) + "\""; }

TEST(TenantFileTest, ReadsEveryField) {
  const auto parsed = ParseTenants(fmt::format(R"({{"tenants": [
        {{"name": "group-a", "token_sha256": "{}", "quota_bytes": 123, "expires": "2024-02-29T23:59:59Z"}},
        {{"name": "b_2.x", "token_sha256": ["{}", "{}"], "quota_bytes": "2GiB"}},
        {{"name": "c", "token_sha256": "{}"}}]}})",
                                               Sha("one"), Sha("two"), Sha("three"), Sha("four")),
                                   "F", 3);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->size(), 3u);
  const Tenant& first = (*parsed)[0];
  EXPECT_EQ(first.name, "group-a");
  EXPECT_EQ(first.tokens, std::vector<Digest>{Sha256("one")});
  EXPECT_EQ(first.quota_bytes, 123u);
  ASSERT_TRUE(first.expires.has_value());
  EXPECT_EQ(std::chrono::system_clock::to_time_t(*first.expires), 1709251199);  // date -d ... +%s
  EXPECT_EQ((*parsed)[1].tokens, (std::vector<Digest>{Sha256("two"), Sha256("three")}));
  EXPECT_EQ((*parsed)[1].quota_bytes, uint64_t{2} << 30);
  EXPECT_EQ((*parsed)[2].quota_bytes, 0u);
  EXPECT_FALSE((*parsed)[2].expires.has_value());
  EXPECT_TRUE(ParseTenants("{\"tenants\": []}", "F", 3)->empty());
}

TEST(TenantFileTest, WhatIsWrongIsNamed) {
  EXPECT_THAT(Error("{\"tenants\": 5}"), HasSubstr("tenants"));
  EXPECT_THAT(Error("{\"tenants\": [5]}"), HasSubstr("must be an object"));
  EXPECT_THAT(Error("{\"tenants\": [], \"version\": 1}"), HasSubstr("'version'"));
  EXPECT_THAT(Error("{\"tenants\": [{" + Token("t") + "}]}"), HasSubstr("name"));
  for (const char* name : {"", "a b", "a\\nb", "\\\"", "ä", "a/b"}) {
    EXPECT_THAT(Error(fmt::format("{{\"tenants\": [{{\"name\": \"{}\", {}}}]}}", name, Token("t"))),
                HasSubstr("name must have"));
  }
  EXPECT_THAT(Error("{\"tenants\": [{\"name\": \"" + std::string(65, 'a') + "\"}]}"),
              HasSubstr("name must have from 1 to 64"));
  EXPECT_THAT(Error(One("\"quota_bytes\": 1")), HasSubstr("token_sha256 is missing"));
  for (const char* token : {"\"\"", "\"abc\"", "7", "null", "{}", "[]", "[1]", "[\"abc\"]"}) {
    EXPECT_THAT(Error(One(fmt::format("\"token_sha256\": {}", token))), HasSubstr("token_sha256"));
  }
  EXPECT_THAT(Error(One("\"token_sha256\": \"" + std::string(64, 'g') + "\"")),
              HasSubstr("64 hexadecimal digits"));
  EXPECT_THAT(Error(One("\"token_sha256\": \"" + Sha("t") + "00\"")), HasSubstr("tenant 'a'"));
  for (const char* quota : {"0", "-1", "1.5", "\"\"", "\"many\"", "true", "[]", "\"0\""}) {
    EXPECT_THAT(Error(One(Token("t") + fmt::format(", \"quota_bytes\": {}", quota))),
                HasSubstr("quota_bytes"));
  }
  for (const char* when :
       {"5", "\"\"", "\"2024-01-01\"", "\"2024-01-01T00:00:00\"", "\"2024-02-30T00:00:00Z\"",
        "\"2024-01-01T00:00:00Zx\"", "\"2024-1-1T0:0:0Z\"", "\"2024-01-01T25:00:00Z\""}) {
    EXPECT_THAT(Error(One(Token("t") + fmt::format(", \"expires\": {}", when))),
                HasSubstr("expires"));
  }
  EXPECT_THAT(Error(One(Token("t") + ", \"quota\": 5")), HasSubstr("unknown field 'quota'"));
}

TEST(TenantFileTest, TenantsAndTokensAreDifferent) {
  const auto tenant = [](const char* name, const std::string& token) {
    return fmt::format("{{\"name\": \"{}\", {}}}", name, Token(token));
  };
  const auto file = [](const std::string& tenants) { return "{\"tenants\": [" + tenants + "]}"; };
  EXPECT_THAT(Error(file(tenant("a", "1") + "," + tenant("a", "2"))),
              HasSubstr("two tenants are called 'a'"));
  EXPECT_THAT(Error(file(tenant("a", "1") + "," + tenant("b", "1"))),
              HasSubstr("tenant 'b' has a token that is there already"));
  EXPECT_THAT(Error(file(tenant("a", "1") + "," + tenant("b", "2") + "," + tenant("c", "3") + "," +
                         tenant("d", "4"))),
              HasSubstr("4 tenants, tenants.tenants_max allows 3"));
}

// Damaged files are errors, never a crash nor a tenant who was not there.
TEST(TenantFileTest, SurvivesDamage) {
  const std::string whole =
      One(Token("t") + ", \"quota_bytes\": \"1GiB\", \"expires\": \"2030-01-01T00:00:00Z\"");
  ASSERT_TRUE(ParseTenants(whole, "F", 3).ok());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(ParseTenants(whole.substr(0, length), "F", 3).ok()) << length;
  }
  std::mt19937 random(7);
  for (int round = 0; round < 20'000; ++round) {
    std::string damaged = whole;
    for (int i = 0; i < 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
    const auto parsed = ParseTenants(damaged, "F", 3);
    if (!parsed.ok()) continue;
    for (const Tenant& tenant : *parsed) {
      EXPECT_FALSE(tenant.name.empty());
      EXPECT_EQ(tenant.tokens.size(), 1u);
    }
  }
  EXPECT_FALSE(ParseTenants(std::string(100'000, '['), "F", 3).ok());
  EXPECT_FALSE(ParseTenants("{\"tenants\": " + std::string(100'000, '[') + "}", "F", 3).ok());
}

}  // namespace
}  // namespace crumb::server
