// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of the client with a real crumbd over TLS.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "common/hex.h"
#include "common/sha256.h"
#include "crumb/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/common/test_certificates.h"

namespace crumb::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

std::string Text(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class TlsTest : public testing::Test {
 protected:
  TlsTest() {
    made_.MakeAuthority("ca");
    made_.MakeAuthority("foreign-ca");
    made_.Make("node", "ca", "crumbd.test");
    made_.Make("worker", "ca", "worker.test");
    made_.Make("stranger", "foreign-ca", "worker.test");
    std::filesystem::create_directory(dir());
  }
  ~TlsTest() override { Stop(); }

  std::string dir() const { return made_.path("crumbd"); }
  std::string output() const { return made_.path("output"); }

  // Starts crumbd with these lines under listen.tls and waits until it serves or ends. Returns the
  // exit code, or -1 while it serves.
  int Start(const std::string& tls, const std::string& more = "") {
    const std::string config = made_.path("crumbd.yaml");
    std::ofstream(config) << "listen:\n  socket_dir: " << dir() << "\n  tcp: 127.0.0.1:0\n  tls:\n"
                          << tls
                          << "admin:\n  listen: \"\"\nstore:\n  host:\n    bytes_max: 16MiB\n"
                             "    slab_bytes: 16MiB\n  ssd:\n    path: \"\"\n"
                          << more;
    const std::string endpoints = dir() + "/crumbd.endpoints.json";
    pid_ = ::fork();
    if (pid_ == 0) {
      const bool opened = std::freopen(output().c_str(), "w", stdout) != nullptr &&
                          ::dup2(STDOUT_FILENO, STDERR_FILENO) >= 0;
      if (opened) ::execl(CRUMBD_PATH, CRUMBD_PATH, "--config", config.c_str(), nullptr);
      ::_exit(99);
    }
    for (int i = 0; i < 30'000 && Text(endpoints).empty(); ++i) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = 0;
        return WEXITSTATUS(status);
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    address_ = nlohmann::json::parse(Text(endpoints)).at("tcp");
    return -1;
  }
  void Stop() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  std::string Files(const std::string& name) const {
    return "    cert_file: " + made_.cert(name) + "\n    key_file: " + made_.key(name) + "\n";
  }
  std::string Checked(const std::string& name) const {
    return Files(name) + "    client_ca_file: " + made_.cert("ca") + "\n";
  }

  // Returns the status of one call over a new connection.
  absl::Status CallWith(const std::string& ca, const std::string& cert,
                        const std::string& server_name = "", const std::string& token = "") const {
    ClientOptions options;
    options.address = address_;
    options.connect_timeout = seconds(1);
    options.call_timeout = seconds(10);
    if (!ca.empty()) options.tls_ca_file = made_.cert(ca);
    if (!cert.empty()) {
      options.tls_cert_file = made_.cert(cert);
      options.tls_key_file = made_.key(cert);
    }
    options.tls_server_name = server_name;
    options.token = token;
    const auto client = Client::Open(options);
    return client.ok() ? (*client)->Stats().status() : client.status();
  }

  TestCertificates made_;
  std::string address_;
  pid_t pid_ = 0;
};

TEST_F(TlsTest, OnlyThoseWithACertificateOfTheAuthorityAreServed) {
  ASSERT_EQ(Start(Checked("node")), -1) << Text(output());
  EXPECT_TRUE(CallWith("ca", "worker").ok()) << CallWith("ca", "worker");
  EXPECT_TRUE(CallWith("ca", "worker", "crumbd.test").ok());

  const auto refused = [](const absl::Status& status, const std::string& text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  refused(CallWith("foreign-ca", "worker"), "crumbd checked with " + made_.cert("foreign-ca"));
  refused(CallWith("ca", "stranger"), "our certificate is " + made_.cert("stranger"));
  refused(CallWith("ca", ""), "without a certificate of this process");
  refused(CallWith("ca", "worker", "another.name"), "over TLS");
  EXPECT_FALSE(CallWith("", "").ok());         // plaintext
  EXPECT_TRUE(CallWith("ca", "worker").ok());  // none of them affected the others
}

TEST_F(TlsTest, WithoutAnAuthorityCallersNeedNoCertificate) {
  ASSERT_EQ(Start(Files("node")), -1) << Text(output());
  EXPECT_TRUE(CallWith("ca", "").ok()) << CallWith("ca", "");
  EXPECT_TRUE(CallWith("ca", "worker").ok());
  EXPECT_FALSE(CallWith("foreign-ca", "").ok());
}

TEST_F(TlsTest, TheClientChecksItsOwnFilesFirst) {
  made_.Make("past", "ca", "worker.test", "-startdate 20200101000000Z -enddate 20210101000000Z");
  address_ = "127.0.0.1:1";
  const absl::Status expired = CallWith("ca", "past");
  EXPECT_EQ(expired.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(expired.message()), HasSubstr("expired on 2021-01-01"));
  EXPECT_THAT(std::string(CallWith("", "worker").message()),
              HasSubstr("needs address and tls_ca_file"));
}

TEST_F(TlsTest, CrumbdDoesNotStartWithFilesThatCannotServe) {
  made_.Make("past", "ca", "crumbd.test", "-startdate 20200101000000Z -enddate 20210101000000Z");
  EXPECT_EQ(Start(Files("past")), 1);
  EXPECT_THAT(Text(output()), HasSubstr("listen.tls.cert_file: " + made_.cert("past")));
  EXPECT_THAT(Text(output()), HasSubstr("expired on 2021-01-01"));
  EXPECT_EQ(Start("    cert_file: " + made_.cert("node") +
                  "\n    key_file: " + made_.key("worker") + "\n"),
            1);
  EXPECT_THAT(Text(output()), HasSubstr("is not the key of the certificate"));
  EXPECT_EQ(Start("    cert_file: /nonexistent.pem\n    key_file: /nonexistent.key\n"), 1);
  EXPECT_THAT(Text(output()), HasSubstr("listen.tls.cert_file: /nonexistent.pem"));
  EXPECT_EQ(Start("    cert_file: " + made_.cert("node") + "\n"), 1);
  EXPECT_THAT(Text(output()), HasSubstr("belong together"));
}

TEST_F(TlsTest, NewFilesServeWithoutARestart) {
  ASSERT_EQ(Start(Checked("node") + "    reload_interval: 1s\n"), -1) << Text(output());
  ASSERT_TRUE(CallWith("ca", "worker", "crumbd.test").ok());
  ASSERT_FALSE(CallWith("ca", "worker", "renamed.test").ok());
  made_.Make("next", "ca", "renamed.test");
  made_.Replace("node", "next");
  absl::Status renamed;
  const auto until = std::chrono::steady_clock::now() + seconds(30);
  do {
    renamed = CallWith("ca", "worker", "renamed.test");
  } while (!renamed.ok() && std::chrono::steady_clock::now() < until);
  EXPECT_TRUE(renamed.ok()) << renamed;
  EXPECT_FALSE(CallWith("ca", "worker", "crumbd.test").ok());
}

TEST_F(TlsTest, TokensOfTenantsTravelUnderTls) {
  const std::string file = made_.path("tenants.json");
  const auto write = [&](const std::string& token) {
    const std::string draft = file + ".new";
    std::ofstream(draft) << "{\"tenants\": [{\"name\": \"a\", \"token_sha256\": \""
                         << HexEncode(Sha256(token)) << "\"}]}";
    std::filesystem::rename(draft, file);
  };
  write("first");
  ASSERT_EQ(Start(Checked("node"), "tenants:\n  file: " + file + "\n  reload_interval: 1h\n"), -1)
      << Text(output());
  EXPECT_TRUE(CallWith("ca", "worker", "", "first").ok());
  EXPECT_THAT(std::string(CallWith("ca", "worker").message()), HasSubstr("needs a tenant's token"));
  EXPECT_THAT(std::string(CallWith("ca", "worker", "", "second").message()),
              HasSubstr("the token is no tenant's"));
  write("second");
  ::kill(pid_, SIGHUP);
  absl::Status taken_up;
  const auto until = std::chrono::steady_clock::now() + seconds(30);
  do {
    taken_up = CallWith("ca", "worker", "", "second");
  } while (!taken_up.ok() && std::chrono::steady_clock::now() < until);
  EXPECT_TRUE(taken_up.ok()) << taken_up;
  EXPECT_FALSE(CallWith("ca", "worker", "", "first").ok());
}

}  // namespace
}  // namespace crumb::client
