// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/test_certificates.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr const char* kPast = "-startdate 20200101000000Z -enddate 20210101000000Z";
constexpr const char* kFuture = "-startdate 20900101000000Z -enddate 20910101000000Z";

class TlsFilesTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    made_ = new TestCertificates();
    made_->MakeAuthority("ca");
    made_->Make("node", "ca", "node");
    made_->Make("other", "ca", "other");
    made_->Make("past", "ca", "past", kPast);
    made_->Make("future", "ca", "future", kFuture);
    std::ofstream(made_->path("text")) << "no certificate\n";
  }
  static void TearDownTestSuite() { delete std::exchange(made_, nullptr); }

  static absl::Status Check(const std::string& cert, const std::string& key,
                            const std::string& ca) {
    return CheckTlsFiles({{"cert_file", cert}, {"key_file", key}, {"ca_file", ca}},
                         std::chrono::system_clock::now());
  }
  static void ExpectError(const absl::Status& status, absl::StatusCode code,
                          const std::string& text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  static TestCertificates* made_;
};
TestCertificates* TlsFilesTest::made_ = nullptr;

TEST_F(TlsFilesTest, WhatFitsTogetherIsGood) {
  EXPECT_TRUE(Check("", "", "").ok());
  EXPECT_TRUE(Check("", "", made_->cert("ca")).ok());
  EXPECT_TRUE(Check(made_->cert("node"), made_->key("node"), made_->cert("ca")).ok());
}

TEST_F(TlsFilesTest, ErrorsNameSettingAndFile) {
  const std::string node = made_->cert("node");
  const std::string key = made_->key("node");
  ExpectError(Check(node, "", ""), absl::StatusCode::kInvalidArgument,
              "cert_file and key_file belong together");
  ExpectError(Check("/nonexistent.pem", key, ""), absl::StatusCode::kNotFound,
              "cert_file: /nonexistent.pem");
  ExpectError(Check(node, "/nonexistent.key", ""), absl::StatusCode::kNotFound,
              "key_file: /nonexistent.key");
  ExpectError(Check("", "", "/nonexistent.ca"), absl::StatusCode::kNotFound,
              "ca_file: /nonexistent.ca");
  ExpectError(Check(made_->path("text"), key, ""), absl::StatusCode::kInvalidArgument,
              "cert_file: " + made_->path("text") + " holds no certificate");
  ExpectError(Check(node, made_->path("text"), ""), absl::StatusCode::kInvalidArgument,
              "key_file: " + made_->path("text") + " holds no private key");
  ExpectError(Check(node, made_->key("other"), ""), absl::StatusCode::kFailedPrecondition,
              "is not the key of the certificate in cert_file: " + node);
  ExpectError(Check("", "", key), absl::StatusCode::kInvalidArgument, "holds no certificate");
}

TEST_F(TlsFilesTest, DatesCount) {
  ExpectError(Check(made_->cert("past"), made_->key("past"), ""),
              absl::StatusCode::kFailedPrecondition, "expired on 2021-01-01 00:00:00 UTC");
  ExpectError(Check(made_->cert("future"), made_->key("future"), ""),
              absl::StatusCode::kFailedPrecondition, "not valid before 2090-01-01 00:00:00 UTC");
  ExpectError(Check("", "", made_->cert("past")), absl::StatusCode::kFailedPrecondition, "expired");
  // The old and the new authority in one file.
  std::ofstream both(made_->path("both"));
  both << std::ifstream(made_->cert("past")).rdbuf() << std::ifstream(made_->cert("ca")).rdbuf();
  both.close();
  EXPECT_TRUE(Check("", "", made_->path("both")).ok());
}

TEST_F(TlsFilesTest, AChainEndsWithItsFirstAndAuthoritiesWithTheirLast) {
  const auto at = [](const char* name) {
    return TlsExpiry({"cert_file", made_->path(name)}, TlsRole::kChain).value();
  };
  const auto past = std::chrono::system_clock::from_time_t(1'609'459'200);    // 2021-01-01
  const auto future = std::chrono::system_clock::from_time_t(3'818'448'000);  // 2091-01-01
  EXPECT_EQ(at("past.pem"), past);
  EXPECT_EQ(at("future.pem"), future);
  std::ofstream chain(made_->path("chain"));
  for (const char* name : {"future", "past", "node"}) {
    chain << std::ifstream(made_->cert(name)).rdbuf();
  }
  chain.close();
  EXPECT_EQ(at("chain"), past);
  const TlsFile file{"ca_file", made_->path("chain")};
  EXPECT_EQ(TlsExpiry(file, TlsRole::kAuthorities).value(), future);
  ExpectError(TlsExpiry({"ca_file", "/nonexistent.ca"}, TlsRole::kAuthorities).status(),
              absl::StatusCode::kNotFound, "ca_file: /nonexistent.ca");
  ExpectError(TlsExpiry({"cert_file", made_->path("text")}, TlsRole::kChain).status(),
              absl::StatusCode::kInvalidArgument, "holds no certificate");
}

}  // namespace
}  // namespace crumb
