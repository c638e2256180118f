// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/certificate_watch.h"

#include "common/recent_log.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/test_certificates.h"

namespace crumb::server {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using testing::HasSubstr;
using Instant = CertificateWatch::Instant;

// The instant at which the certificates below end.
const Instant kEnd = std::chrono::system_clock::from_time_t(1'609'459'200);  // 2021-01-01

class CertificateWatchTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    made_ = new TestCertificates();
    made_->MakeAuthority("ca");
    made_->Make("node", "ca", "node", "-startdate 20200101000000Z -enddate 20210101000000Z");
    made_->Make("later", "ca", "later", "-startdate 20200101000000Z -enddate 20220101000000Z");
  }
  static void TearDownTestSuite() { delete std::exchange(made_, nullptr); }

  CertificateWatchTest()
      : watch_({{{"listen.tls.cert_file", made_->path("served")}, TlsRole::kChain},
                {{"listen.tls.client_ca_file", ""}, TlsRole::kAuthorities}},
               hours(10), [this] { return now_; }) {
    Serve("node");
  }

  static void Serve(const std::string& name) {
    std::filesystem::copy_file(made_->cert(name), made_->path("served"),
                               std::filesystem::copy_options::overwrite_existing);
  }
  // Looks at this instant; how many warnings and errors that logged.
  std::pair<uint64_t, uint64_t> Look(Instant now) {
    const auto count = [] {
      return std::pair(RecentLog::Process().Count(Severity::kWarning),
                       RecentLog::Process().Count(Severity::kError));
    };
    now_ = now;
    const auto before = count();
    watch_.Look();
    const auto after = count();
    return {after.first - before.first, after.second - before.second};
  }
  static std::string LastLine() { return RecentLog::Process().Problems().back().text; }

  static TestCertificates* made_;
  Instant now_;
  CertificateWatch watch_;
};
TestCertificates* CertificateWatchTest::made_ = nullptr;

constexpr std::pair<uint64_t, uint64_t> kSilent{0, 0}, kWarned{1, 0}, kFailed{0, 1};

TEST_F(CertificateWatchTest, WarnsFromThatTimeOnOnceADay) {
  EXPECT_EQ(Look(kEnd - hours(10) - seconds(1)), kSilent);
  EXPECT_EQ(Look(kEnd - hours(10)), kWarned);
  EXPECT_THAT(LastLine(), HasSubstr("listen.tls.cert_file: " + made_->path("served")));
  EXPECT_THAT(LastLine(), HasSubstr("expires on 2021-01-01 00:00:00 UTC"));
  EXPECT_EQ(Look(kEnd - hours(1)), kSilent);
  EXPECT_EQ(Look(kEnd + hours(14) - seconds(1)), kSilent);
  EXPECT_EQ(Look(kEnd + hours(14)), kFailed);  // a day later it has ended
  EXPECT_THAT(LastLine(), HasSubstr("expired on 2021-01-01 00:00:00 UTC"));
}

TEST_F(CertificateWatchTest, AnotherCertificateIsAnotherMatter) {
  EXPECT_EQ(Look(kEnd - hours(1)), kWarned);
  Serve("later");
  EXPECT_EQ(Look(kEnd - hours(1)), kSilent);
  ASSERT_TRUE(watch_.Read().front().expires);
  EXPECT_EQ(*watch_.Read().front().expires, kEnd + hours(365 * 24));
  Serve("node");
  EXPECT_EQ(Look(kEnd - hours(1)), kWarned);  // back again, and no day has passed
}

TEST_F(CertificateWatchTest, AFileThatCannotBeReadIsLoggedOnceAndKeepsItsInstant) {
  EXPECT_EQ(Look(kEnd - hours(20)), kSilent);
  std::filesystem::remove(made_->path("served"));
  EXPECT_EQ(Look(kEnd - hours(20)), kFailed);
  EXPECT_THAT(LastLine(), HasSubstr("listen.tls.cert_file: " + made_->path("served")));
  EXPECT_EQ(Look(kEnd - hours(20)), kSilent);
  EXPECT_EQ(watch_.Read().front().expires, kEnd);
  Serve("node");
  EXPECT_EQ(Look(kEnd - hours(20)), kSilent);
  std::filesystem::remove(made_->path("served"));
  EXPECT_EQ(Look(kEnd - hours(20)), kFailed);
}

TEST_F(CertificateWatchTest, WhatIsNotSetHasNoInstant) {
  EXPECT_EQ(Look(kEnd + hours(1)), kFailed);  // the other one
  const auto readings = watch_.Read();
  ASSERT_EQ(readings.size(), 2u);
  EXPECT_EQ(readings[0].setting, "listen.tls.cert_file");
  EXPECT_EQ(readings[1].setting, "listen.tls.client_ca_file");
  EXPECT_FALSE(readings[1].expires);
}

}  // namespace
}  // namespace crumb::server
