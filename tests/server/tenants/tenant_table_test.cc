// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/tenants/tenant_table.h"

#include <filesystem>
#include <fstream>

#include "common/hex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

class TenantTableTest : public testing::Test {
 protected:
  TenantTableTest() { options_.file = folder_.path() + "/tenants.json"; }

  static std::string Entry(const std::string& name, const std::string& token,
                           const std::string& more = "") {
    return "{\"name\": \"" + name + "\", \"token_sha256\": \"" + HexEncode(Sha256(token)) + "\"" +
           more + "}";
  }
  // In one step, as an editor would.
  void Write(const std::string& tenants) const {
    const std::string draft = options_.file + ".new";
    std::ofstream(draft) << "{\"tenants\": [" << tenants << "]}";
    std::filesystem::rename(draft, options_.file);
  }
  std::unique_ptr<TenantTable> Open() {
    return TenantTable::Open(options_, [this] { return now_; }).value();
  }

  TemporaryFolder folder_;
  TenantOptions options_;
  Tenant::Instant now_ = std::chrono::system_clock::from_time_t(1'700'000'000);  // 2023-11-14
};

TEST_F(TenantTableTest, ATokenIsItsTenants) {
  Write(Entry("a", "token of a") + "," + Entry("b", "token of b"));
  const auto table = Open();
  EXPECT_EQ(table->Authenticate("token of a")->name(), "a");
  EXPECT_EQ(table->Authenticate("token of b")->name(), "b");
  for (const char* token : {"", "token of", "token of a ", "Token of a", "a"}) {
    const auto caller = table->Authenticate(token);
    EXPECT_EQ(caller.status().code(), absl::StatusCode::kUnauthenticated) << token;
    EXPECT_THAT(std::string(caller.status().message()), HasSubstr("no tenant's"));
  }
  EXPECT_EQ(table->failures(AuthFailure::kUnknown), 5u);
  EXPECT_EQ(table->failures(AuthFailure::kExpired), 0u);
  // The digest is not the token.
  EXPECT_FALSE(table->Authenticate(HexEncode(Sha256("token of a"))).ok());
}

TEST_F(TenantTableTest, ATokenEndsAtItsInstant) {
  Write(Entry("a", "t", ", \"expires\": \"2023-11-14T22:13:21Z\""));  // a second later
  const auto table = Open();
  EXPECT_TRUE(table->Authenticate("t").ok());
  now_ += std::chrono::seconds(1);
  const auto caller = table->Authenticate("t");
  EXPECT_EQ(caller.status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(caller.status().message()), HasSubstr("'a' has expired"));
  EXPECT_EQ(table->failures(AuthFailure::kExpired), 1u);
}

TEST_F(TenantTableTest, ANewFileCountsAndABadOneDoesNot) {
  Write(Entry("a", "old"));
  const auto table = Open();
  Write(Entry("a", "new", ", \"quota_bytes\": 5"));
  EXPECT_TRUE(table->Authenticate("old").ok());
  EXPECT_TRUE(table->Reload(false).ok());
  EXPECT_FALSE(table->Authenticate("old").ok());
  EXPECT_EQ(table->Authenticate("new")->tenant->quota_bytes, 5u);

  std::ofstream(options_.file) << "{";
  EXPECT_EQ(table->Reload(false).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(table->Reload(false).ok());  // seen already
  EXPECT_EQ(table->Reload(true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(table->Authenticate("new").ok());
  std::filesystem::remove(options_.file);
  EXPECT_EQ(table->Reload(false).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(table->Authenticate("new").ok());
  EXPECT_EQ(table->reload_failures(), 3u);

  Write(Entry("b", "b"));
  EXPECT_TRUE(table->Reload(false).ok());
  EXPECT_FALSE(table->Authenticate("new").ok());
  EXPECT_EQ(table->Find("a"), nullptr);
  EXPECT_EQ(table->List().size(), 1u);
}

TEST_F(TenantTableTest, AFileThatEverybodyMayWriteIsRefused) {
  Write(Entry("a", "t"));
  std::filesystem::permissions(options_.file, std::filesystem::perms::others_write,
                               std::filesystem::perm_options::add);
  const auto table = TenantTable::Open(options_, [this] { return now_; });
  EXPECT_EQ(table.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(table.status().message()), HasSubstr(options_.file));
}

}  // namespace
}  // namespace crumb::server
