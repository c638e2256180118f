// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Nodes that talk TLS to each other, and who else may call what they ask of each other.
#include <fstream>
#include <sstream>

#include "crumb/v1/peer_service.grpc.pb.h"
#include "gmock/gmock.h"
#include "tests/common/test_certificates.h"
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

TEST_F(ClusterTlsTest, OnlyNodesMayAskWhatNodesAsk) {
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

TEST_F(ClusterTlsTest, ANodeOfAnotherAuthorityStaysOutside) {
  made_.MakeAuthority("foreign-ca");
  made_.Make("foreign", "foreign-ca", kPeerName);
  TestNodes::Settings settings = Settings();
  const auto common = settings.change;
  settings.change = [&](int node, Options& options) {
    common(node, options);
    options.cluster.start_deadline = std::chrono::milliseconds(300);
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
  EXPECT_EQ(sequence.Read(*writer), 4);
  for (int node = 0; node < 2; ++node) {
    const v1::ListNodesResponse listed = nodes.ListNodes(node);
    for (const auto& each : listed.nodes()) EXPECT_TRUE(each.self() || !each.up());
  }
}

}  // namespace
}  // namespace crumb::server
