// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/options.h"

#include <fstream>
#include <sstream>

#include "common/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

std::string FileText(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(file.good()) << path;
  return text.str();
}

std::string Printed(Options options, bool comments) {
  return PrintConfig([&](ConfigVisitor& visitor) { options.Visit(visitor); }, comments);
}

absl::Status Read(const std::string& text, Options& options) {
  return ReadConfig("crumbd.yaml", text, [&](ConfigVisitor& visitor) { options.Visit(visitor); });
}

std::string Invalid(const std::string& text) {
  Options options;
  EXPECT_TRUE(Read(text, options).ok()) << text;
  options.Complete();
  const absl::Status status = options.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(status.message());
}

TEST(OptionsTest, TheDefaultsAreValid) {
  Options options;
  options.Complete();
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
  EXPECT_EQ(options.listen.unix_socket, "/run/crumb/crumbd.sock");
  EXPECT_EQ(options.listen.fd_socket, "/run/crumb/crumbd.fd.sock");
}

TEST(OptionsTest, AFolderAndAPathAreEnough) {
  Options options;
  ASSERT_TRUE(
      Read("listen:\n  socket_dir: /tmp/a\nstore:\n  ssd:\n    path: /tmp/b\n", options).ok());
  options.Complete();
  EXPECT_TRUE(options.Validate().ok());
  EXPECT_EQ(options.listen.endpoints_file, "/tmp/a/crumbd.endpoints.json");
}

TEST(OptionsTest, TheShippedFileHoldsEverySettingAtItsDefault) {
  EXPECT_THAT(FileText("deploy/config/crumbd.yaml"), HasSubstr(Printed(Options(), true)));
  Options read;
  ASSERT_TRUE(Read(FileText("deploy/config/crumbd.yaml"), read).ok());
  EXPECT_EQ(Printed(read, false), Printed(Options(), false));
}

TEST(OptionsTest, TheDocumentHoldsEverySetting) {
  EXPECT_THAT(FileText("docs/config.md"),
              HasSubstr("```yaml\n" + Printed(Options(), true) + "```\n"));
}

TEST(OptionsTest, ErrorsNameKeyAndBound) {
  EXPECT_THAT(Invalid("limits:\n  commit_threads: 0\n"),
              HasSubstr("limits.commit_threads is 0, must be from 1 to 256"));
  EXPECT_THAT(Invalid("limits:\n  chunk_bytes: 1GiB\n"),
              HasSubstr("limits.chunk_bytes is 1GiB, must be from 4KiB to 3MiB"));
  EXPECT_THAT(Invalid("limits:\n  wait_max: 0\n"), HasSubstr("limits.wait_max"));
  EXPECT_THAT(Invalid("sessions:\n  sessions_max: -1\n"), HasSubstr("sessions.sessions_max"));
  EXPECT_THAT(Invalid("sessions:\n  allowed_uids: [me]\n"), HasSubstr("'me' is no numeric"));
  EXPECT_THAT(Invalid("listen:\n  tcp: 8080\n"), HasSubstr("listen.tcp is '8080'"));
  EXPECT_THAT(Invalid("listen:\n  socket_dir: \"\"\n"), HasSubstr("listen.socket_dir"));
  EXPECT_THAT(Invalid("listen:\n  unix: /a\n  fd_socket: /a\n"), HasSubstr("are both /a"));
  EXPECT_THAT(Invalid("listen:\n  tls:\n    cert_file: /a\n"), HasSubstr("belong together"));
  EXPECT_THAT(Invalid("listen:\n  tls:\n    client_ca_file: /a\n"),
              HasSubstr("listen.tls.client_ca_file needs listen.tls.cert_file"));
  EXPECT_THAT(Invalid("listen:\n  tls:\n    cert_file: /a\n    key_file: /b\n    peer_name: c\n"),
              HasSubstr("listen.tls.peer_name needs listen.tls.client_ca_file"));
  EXPECT_THAT(Invalid("listen:\n  tls:\n    reload_interval: 10ms\n"),
              HasSubstr("listen.tls.reload_interval"));
  EXPECT_THAT(Invalid("listen:\n  tls:\n    expiry_warning: 90000h\n"),
              HasSubstr("listen.tls.expiry_warning"));
  EXPECT_THAT(Invalid("listen:\n  tcp: 127.0.0.1:0\n  tls:\n    cert_file: /a\n    key_file: /b\n"
                      "cluster:\n  nodes: [\"127.0.0.1:1\"]\n  secret_file: /s\n"),
              HasSubstr("a cluster over TLS needs listen.tls.client_ca_file"));
  EXPECT_THAT(Invalid("tenants:\n  tenants_max: 0\n"), HasSubstr("tenants.tenants_max is 0"));
  EXPECT_THAT(Invalid("tenants:\n  shared_memory: some\n"),
              HasSubstr("tenants.shared_memory is 'some', must be one of off, own, all"));
  EXPECT_THAT(Invalid("tenants:\n  reload_interval: 1ms\n"), HasSubstr("tenants.reload_interval"));
  EXPECT_THAT(Invalid("listen:\n  tcp: 127.0.0.1:0\ntenants:\n  file: /t\n"
                      "cluster:\n  nodes: [\"127.0.0.1:1\"]\n  secret_file: /s\n"),
              HasSubstr("tenants.file in a cluster needs listen.tls.peer_name"));
  EXPECT_THAT(Invalid("admin:\n  listen: localhost\n"), HasSubstr("admin.listen"));
  EXPECT_THAT(Invalid("admin:\n  threads: 1000\n"), HasSubstr("admin.threads is 1000"));
  EXPECT_THAT(Invalid("admin:\n  history_interval: 0\n"), HasSubstr("admin.history_interval"));
  EXPECT_THAT(Invalid("admin:\n  history_samples_max: 1\n"),
              HasSubstr("admin.history_samples_max is 1, must be from 2"));
  EXPECT_THAT(Invalid("log:\n  severity: loud\n"), HasSubstr("log.severity is 'loud'"));
  EXPECT_THAT(Invalid("stop_grace: 0\n"), HasSubstr("stop_grace is 0, must be more than 0"));
  EXPECT_THAT(Invalid("store:\n  host:\n    policy: none\n"), HasSubstr("none"));
}

}  // namespace
}  // namespace crumb::server
