// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/cluster/test_nodes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "common/crc32c.h"
#include "common/sha256.h"
#include "common/unique_fd.h"
#include "gtest/gtest.h"
#include "tests/common/eventually.h"

namespace crumb::server {

int FreePort() {
  static std::mt19937 random{std::random_device()()};
  static std::set<int> given;
  for (int tries = 0; tries < 1000; ++tries) {
    // Below those that outgoing connections take: a node may start much later.
    const int port = std::uniform_int_distribution(15'000, 32'000)(random);
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) continue;
    if (given.insert(port).second) return port;
  }
  return 0;
}

TestNodes::TestNodes(const Settings& settings) : settings_(settings) {
  const std::string secret = folder_.path() + "/secret";
  std::ofstream(secret) << "the secret of a test cluster";
  std::vector<std::string> addresses;
  for (int i = 0; i < settings.count; ++i) {
    addresses.push_back("127.0.0.1:" + std::to_string(FreePort()));
  }
  for (int i = 0; i < settings.count; ++i) {
    const std::string home = folder_.path() + "/" + std::to_string(i);
    std::filesystem::create_directory(home);
    Options& options = options_.emplace_back();
    options.listen.socket_dir = home;
    options.listen.tcp = addresses[static_cast<size_t>(i)];
    options.admin.listen = "127.0.0.1:0";
    options.store.host.bytes_max = ByteSize{32 << 20};
    options.store.host.slab_bytes = ByteSize{16 << 20};
    options.store.ssd.path = home + "/data";
    options.store.ssd.bytes_max = ByteSize{64 << 20};
    options.log.severity = "error";
    options.cluster.secret_file = secret;
    if (settings.etcd.empty()) {
      options.cluster.nodes = addresses;
    } else {
      options.cluster.etcd = settings.etcd;
    }
    options.cluster.host = "host-" + std::to_string(i);
    options.cluster.heartbeat = std::chrono::milliseconds(50);
    options.cluster.node_ttl = settings.node_ttl;
    options.cluster.rpc_deadline = std::chrono::milliseconds(500);
    options.cluster.start_deadline = std::chrono::seconds(2);
    options.cluster.lookup_deadline = std::chrono::seconds(2);
    if (settings.ucx) options.transport.listen = "127.0.0.1:0";
    options.Complete();
    settings.change(i, options);
  }
  daemons_.resize(static_cast<size_t>(settings.count));
  // All nodes start at once, because a node waits at its start for the records of others.
  std::vector<std::thread> starting;
  for (int i = 0; i < settings.count; ++i) starting.emplace_back([this, i] { Start(i); });
  for (std::thread& thread : starting) thread.join();
}

void TestNodes::Start(int node) {
  daemons_[static_cast<size_t>(node)] = Daemon::Start(options_[static_cast<size_t>(node)]).value();
}

void TestNodes::Stop(int node) { daemons_[static_cast<size_t>(node)].reset(); }

std::unique_ptr<TestClient> TestNodes::Connect(int node) {
  const Daemon::Endpoints places = daemon(node).endpoints();
  auto client = std::make_unique<TestClient>(places.fd_socket, "unix:" + places.unix_socket);
  EXPECT_TRUE(client->OpenKeyspace().ok());
  return client;
}

v1::ListNodesResponse TestNodes::ListNodes(int node) {
  const auto stub = v1::CacheService::NewStub(grpc::CreateChannel(
      "unix:" + daemon(node).endpoints().unix_socket, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::ListNodesResponse response;
  EXPECT_TRUE(stub->ListNodes(&context, {}, &response).ok());
  return response;
}

std::string TestNodes::IdOf(int node) {
  const v1::ListNodesResponse response = ListNodes(node);
  for (const auto& each : response.nodes()) {
    if (each.self()) return each.id();
  }
  return "";
}

bool TestNodes::WaitForView(int homes) {
  return Eventually([&] {
    for (int i = 0; i < count(); ++i) {
      if (!running(i)) continue;
      const v1::ListNodesResponse response = ListNodes(i);
      const auto& nodes = response.nodes();
      const auto active = std::count_if(nodes.begin(), nodes.end(),
                                        [](const auto& node) { return node.state() == "active"; });
      if (active != homes) return false;
    }
    return true;
  });
}

PageKey TestSequence::Key(int page) const {
  PageKey key;
  key.bytes = Sha256("sequence " + std::to_string(name_) + " page " + std::to_string(page));
  return key;
}

std::string TestSequence::Keys() const {
  std::string keys;
  for (int page = 0; page < pages_; ++page) keys += Key(page).view();
  return keys;
}

std::vector<std::byte> TestSequence::Fragment(const TestClient& client, int page) const {
  const PageKey key = Key(page);
  std::vector<std::byte> fragment = client.Fragment(key, key.bytes[0]);
  const size_t tiles = client.tiles_bytes();
  FragmentHeader header = DecodeFragmentHeader(std::span(fragment).subspan(tiles)).value();
  if (page > 0) header.parent = Key(page - 1);
  header.position = static_cast<uint32_t>(page) + 1;
  std::memcpy(fragment.data(), key.bytes.data(), key.bytes.size());
  header.tile_sums[0] = Crc32c(std::span<const std::byte>(fragment).first(header.tile_bytes));
  EncodeFragmentHeader(header, std::span(fragment).subspan(tiles));
  return fragment;
}

int TestSequence::Commit(TestClient& client) const {
  int stored = 0;
  for (int page = 0; page < pages_; ++page) {
    v1::CommitResponse response;
    EXPECT_TRUE(client.Commit(Fragment(client, page), &response).ok());
    if (response.outcomes_size() == 1 && response.outcomes(0) == v1::COMMIT_OUTCOME_STORED) {
      ++stored;
    }
  }
  return stored;
}

int TestSequence::Read(TestClient& client, std::vector<v1::Tier>* tiers, v1::MissReason* reason,
                       uint32_t wait_ms) const {
  v1::AcquireRequest request;
  request.set_keyspace(client.keyspace().keyspace());
  request.set_keys(Keys());
  request.set_wait_ms(wait_ms);
  v1::AcquireResponse response;
  const grpc::Status status = client.stub().Acquire(client.Context().get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  int right = 0;
  for (int i = 0; i < response.fragments().pages_size(); ++i) {
    const int page = static_cast<int>(response.fragments().pages(i));
    const std::vector<std::byte> expected = Fragment(client, page);
    const auto bytes = client.Mapped(response.fragments(), i);
    if (std::equal(expected.begin(), expected.end(), bytes.begin(), bytes.end())) ++right;
  }
  if (tiers != nullptr) {
    tiers->clear();
    for (const int tier : response.page_tiers()) tiers->push_back(static_cast<v1::Tier>(tier));
  }
  if (reason != nullptr) *reason = response.miss_reason();
  if (response.lease() != 0) {
    EXPECT_TRUE(client.Release(response.lease()).ok());
  }
  return right == static_cast<int>(response.hit_pages()) ? right : -1;
}

}  // namespace crumb::server
