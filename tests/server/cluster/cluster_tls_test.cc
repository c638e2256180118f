// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Nodes that talk TLS to each other, and which other callers may make the calls between nodes.
#include <fstream>
#include <sstream>

#include "crumb/v1/peer_service.grpc.pb.h"
#include "gmock/gmock.h"
#include "server/cluster/etcd/etcd_client.h"
#include "tests/common/eventually.h"
#include "tests/common/test_certificates.h"
#include "tests/server/cluster/etcd_process.h"
#include "tests/server/cluster/test_nodes.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

constexpr const char* kPeerName = "crumbd.cluster.test";

std::string Text(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class ClusterTlsTest : public testing::Test {
 protected:
  ClusterTlsTest() {
    made_.MakeAuthority("ca");
    made_.Make("node", "ca", kPeerName);
    made_.Make("worker", "ca", "worker.test");
  }

  TestNodes::Settings Settings() const {
    TestNodes::Settings settings;
    settings.count = 2;
    settings.ucx = false;
    settings.change = [this](int, Options& options) {
      options.listen.tls.cert_file = made_.cert("node");
      options.listen.tls.key_file = made_.key("node");
      options.listen.tls.client_ca_file = made_.cert("ca");
      options.listen.tls.peer_name = kPeerName;
    };
    return settings;
  }

  // How PeerHello ends for a caller with this certificate.
  grpc::Status Hello(const std::string& address, const std::string& name) const {
    grpc::SslCredentialsOptions files;
    files.pem_root_certs = Text(made_.cert("ca"));
    files.pem_cert_chain = Text(made_.cert(name));
    files.pem_private_key = Text(made_.key(name));
    return HelloOver(grpc::CreateChannel(address, grpc::SslCredentials(files)));
  }
  static grpc::Status HelloOver(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::PeerHelloResponse response;
    return v1::PeerService::NewStub(channel)->PeerHello(&context, {}, &response);
  }

  TestCertificates made_;
};

TEST_F(ClusterTlsTest, PagesTravelBetweenNodes) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(2));
  const auto writer = nodes.Connect(0);
  const auto reader = nodes.Connect(1);
  for (int i = 0; i < 4; ++i) {
    const TestSequence sequence(i, 40);
    ASSERT_EQ(sequence.Commit(*writer), 40);
    EXPECT_TRUE(Eventually([&] { return sequence.Read(*reader) == 40; }));
  }
}

TEST_F(ClusterTlsTest, OnlyNodesMayMakeTheCallsBetweenNodes) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(2));
  const Daemon::Endpoints places = nodes.daemon(0).endpoints();
  const grpc::Status node = Hello(places.tcp, "node");
  EXPECT_TRUE(node.ok()) << node.error_message();
  const grpc::Status worker = Hello(places.tcp, "worker");
  EXPECT_EQ(worker.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(worker.error_message(), HasSubstr(kPeerName));
  const grpc::Status local = HelloOver(
      grpc::CreateChannel("unix:" + places.unix_socket, grpc::InsecureChannelCredentials()));
  EXPECT_EQ(local.error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(ClusterTlsTest, CallersThatAreRefusedInTheHandshakeAreCounted) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(2));
  const Daemon::Endpoints places = nodes.daemon(0).endpoints();
  const auto failures = [&] {
    return SeriesOf(places.admin, "crumb_tls_handshake_failures_total");
  };
  made_.Make("ended", "ca", kPeerName, "-startdate 20200101000000Z -enddate 20210101000000Z");
  made_.MakeAuthority("foreign-ca");
  made_.Make("foreign", "foreign-ca", kPeerName);
  for (const char* name : {"ended", "foreign"}) {
    const double before = failures();
    EXPECT_FALSE(Hello(places.tcp, name).ok()) << name;
    EXPECT_TRUE(Eventually([&] { return failures() > before; })) << name;
  }
  const double before = failures();
  EXPECT_FALSE(HelloOver(grpc::CreateChannel(places.tcp, grpc::InsecureChannelCredentials())).ok());
  EXPECT_TRUE(Eventually([&] { return failures() > before; })) << "without TLS";
  EXPECT_TRUE(Hello(places.tcp, "node").ok());
}

TEST_F(ClusterTlsTest, ANodeOfAnotherAuthorityStaysOutside) {
  made_.MakeAuthority("foreign-ca");
  made_.Make("foreign", "foreign-ca", kPeerName);
  TestNodes::Settings settings = Settings();
  const auto common = settings.change;
  settings.change = [&](int node, Options& options) {
    common(node, options);
    options.cluster.start_deadline = std::chrono::milliseconds(300);
    options.cluster.serve_unsynced = true;  // neither ever learns of the other
    if (node == 0) return;
    options.listen.tls.cert_file = made_.cert("foreign");
    options.listen.tls.key_file = made_.key("foreign");
    options.listen.tls.client_ca_file = made_.cert("foreign-ca");
  };
  TestNodes nodes(settings);
  const auto writer = nodes.Connect(0);
  const auto reader = nodes.Connect(1);
  const TestSequence sequence(1, 4);
  EXPECT_EQ(sequence.Commit(*writer), 4);
  EXPECT_EQ(sequence.Read(*reader), 0);
  EXPECT_TRUE(Eventually([&] { return sequence.Read(*writer) == 4; }));  // after start_deadline
  for (int node = 0; node < 2; ++node) {
    const v1::ListNodesResponse listed = nodes.ListNodes(node);
    for (const auto& each : listed.nodes()) EXPECT_TRUE(each.self() || !each.up());
  }
}

// etcd over TLS that requests certificates.
class EtcdTlsTest : public ClusterTlsTest {
 protected:
  void SetUp() override {
    ASSERT_TRUE(EtcdProcess::Installed()) << "install the package etcd-server";
    made_.Make("etcd", "ca", "etcd.test");
    access_.ca_file = made_.cert("ca");
    access_.cert_file = made_.cert("node");
    access_.key_file = made_.key("node");
    access_.reload_interval = std::chrono::seconds(1);
  }

  EtcdProcess::Settings Secured() const {
    EtcdProcess::Settings settings;
    settings.cert = made_.cert("etcd");
    settings.key = made_.key("etcd");
    settings.ca = made_.cert("ca");
    settings.access = access_;
    return settings;
  }
  static absl::Status Try(const EtcdProcess& etcd, const EtcdAccess& access) {
    int64_t revision = 0;
    return EtcdClient::Make({etcd.endpoint()}, std::chrono::seconds(3), access)
        ->Range("/crumb/", &revision)
        .status();
  }

  EtcdAccess access_;
};

TEST_F(EtcdTlsTest, NodesMeetOverItAndStrangersDoNot) {
  EtcdProcess etcd(Secured());
  ASSERT_TRUE(etcd.Start());
  TestNodes::Settings settings = Settings();
  const auto common = settings.change;
  settings.etcd = {etcd.endpoint()};
  settings.change = [&](int node, Options& options) {
    common(node, options);
    options.cluster.etcd_access = access_;
  };
  TestNodes nodes(settings);
  ASSERT_TRUE(nodes.WaitForView(2));
  // Without TLS, without a certificate, with a foreign one, expecting another name.
  EXPECT_FALSE(Try(etcd, EtcdAccess()).ok());
  EtcdAccess none = access_;
  none.cert_file = none.key_file = "";
  EXPECT_FALSE(Try(etcd, none).ok());
  made_.MakeAuthority("foreign-ca");
  made_.Make("foreign", "foreign-ca", "worker.test");
  EtcdAccess foreign = access_;
  foreign.cert_file = made_.cert("foreign");
  foreign.key_file = made_.key("foreign");
  EXPECT_FALSE(Try(etcd, foreign).ok());
  EtcdAccess distrusting = access_;
  distrusting.ca_file = made_.cert("foreign-ca");
  EXPECT_FALSE(Try(etcd, distrusting).ok());
  EtcdAccess named = access_;
  named.server_name = "etcd.test";
  EXPECT_TRUE(Eventually([&] { return Try(etcd, named).ok(); }));
  named.server_name = "another.test";
  EXPECT_FALSE(Try(etcd, named).ok());
}

TEST_F(EtcdTlsTest, FilesAreTakenUpAgain) {
  EtcdProcess etcd(Secured());
  ASSERT_TRUE(etcd.Start());
  made_.MakeAuthority("foreign-ca");
  made_.Make("login", "foreign-ca", "worker.test");
  EtcdAccess access = access_;
  access.cert_file = made_.cert("login");
  access.key_file = made_.key("login");
  const auto client = EtcdClient::Make({etcd.endpoint()}, std::chrono::seconds(1), access);
  int64_t revision = 0;
  EXPECT_FALSE(client->Range("/crumb/", &revision).ok());
  made_.Make("fresh", "ca", "worker.test");
  made_.Replace("login", "fresh");
  EXPECT_TRUE(Eventually([&] { return client->Range("/crumb/", &revision).ok(); }));
}

TEST_F(EtcdTlsTest, FilesAreCheckedBeforeTheStart) {
  const auto now = std::chrono::system_clock::now();
  EXPECT_TRUE(access_.CheckFiles(now).ok());
  EXPECT_THAT(access_.CheckFiles(now + std::chrono::hours(24 * 30)).message(),
              HasSubstr("cluster.etcd_access.cert_file"));
  EtcdAccess wrong = access_;
  wrong.key_file = made_.key("worker");
  EXPECT_TRUE(absl::IsFailedPrecondition(wrong.CheckFiles(now)));
  wrong = access_;
  wrong.key_file = "";
  EXPECT_TRUE(absl::IsInvalidArgument(wrong.Validate()));
  wrong = access_;
  wrong.ca_file = "";
  EXPECT_TRUE(absl::IsInvalidArgument(wrong.Validate()));
  wrong = access_;
  wrong.user = "crumb";
  EXPECT_TRUE(absl::IsInvalidArgument(wrong.Validate()));
  wrong.password_file = made_.path("no-such-file");
  EXPECT_TRUE(absl::IsNotFound(wrong.CheckFiles(now)));
}

TEST_F(EtcdTlsTest, AUserLogsInAndAgainWhenEtcdHasForgotten) {
  EtcdProcess etcd;
  ASSERT_TRUE(etcd.Start());
  // "crumb" may read and write from "/crumb/" up to "/crumb0", and nothing else.
  for (const auto& [path, json] :
       {std::pair{"user/add", R"({"name": "root", "password": "of root"})"},
        std::pair{"user/add", R"({"name": "crumb", "password": "a password"})"},
        std::pair{"role/add", R"({"name": "root"})"}, std::pair{"role/add", R"({"name": "nodes"})"},
        std::pair{"role/grant", R"({"name": "nodes", "perm": {"permType": "READWRITE",
                                    "key": "L2NydW1iLw==", "range_end": "L2NydW1iMA=="}})"},
        std::pair{"user/grant", R"({"user": "root", "role": "root"})"},
        std::pair{"user/grant", R"({"user": "crumb", "role": "nodes"})"}}) {
    ASSERT_TRUE(etcd.Post(std::string("/v3/auth/") + path, json)) << json;
  }
  ASSERT_TRUE(etcd.Post("/v3/auth/enable", "{}"));
  EtcdAccess access;
  access.user = "crumb";
  access.password_file = made_.path("password");
  std::ofstream(access.password_file) << "not the password\n";
  EXPECT_FALSE(Try(etcd, EtcdAccess()).ok());
  const absl::Status refused = Try(etcd, access);
  EXPECT_THAT(refused.message(), HasSubstr("logging in to etcd as crumb"));
  TestNodes::Settings settings;
  settings.count = 2;
  settings.etcd = {etcd.endpoint()};
  settings.change = [&](int, Options& options) {
    options.cluster.etcd_access = access;
    options.cluster.rpc_deadline = std::chrono::seconds(5);  // a login hashes a password
    options.cluster.start_deadline = std::chrono::milliseconds(300);
  };
  TestNodes nodes(settings);
  const std::string admin = nodes.daemon(0).endpoints().admin;
  EXPECT_TRUE(
      Eventually([&] { return SeriesOf(admin, "crumb_etcd_state{state=\"refused\"}") == 1; }));
  std::ofstream(access.password_file) << "a password\n";
  ASSERT_TRUE(nodes.WaitForView(2));
  // Its tokens are gone with it.
  etcd.Stop();
  ASSERT_TRUE(etcd.Start(access));
  nodes.Stop(1);
  ASSERT_TRUE(nodes.WaitForView(1));
  nodes.Start(1);
  ASSERT_TRUE(nodes.WaitForView(2));
  EXPECT_TRUE(Eventually([&] { return SeriesOf(admin, "crumb_etcd_state{state=\"ok\"}") == 1; }));
}

}  // namespace
}  // namespace crumb::server
