// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/daemon/daemon.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/series.h"
#include "tests/server/test_client.h"

namespace crumb::server {

// A TCP port of the loopback interface that was free a moment ago.
int FreePort();

// Some crumbds of one cluster in this process, at loopback addresses.
class TestNodes {
 public:
  struct Settings {
    int count = 3;
    bool ucx = true;
    std::vector<std::string> etcd;  // empty: a static list
    Duration node_ttl = std::chrono::seconds(1);
    std::function<void(int, Options&)> change = [](int, Options&) {};
  };

  explicit TestNodes(const Settings& settings);

  void Start(int node);
  void Stop(int node);
  Daemon& daemon(int node) { return *daemons_[static_cast<size_t>(node)]; }
  bool running(int node) const { return daemons_[static_cast<size_t>(node)] != nullptr; }
  int count() const { return settings_.count; }

  // A worker of a node, with the keyspace open.
  std::unique_ptr<TestClient> Connect(int node);
  v1::ListNodesResponse ListNodes(int node);
  std::string IdOf(int node);
  // Waits until every running node's view has `homes` nodes.
  bool WaitForView(int homes);
  Options& options(int node) { return options_[static_cast<size_t>(node)]; }

 private:
  const Settings settings_;
  TemporaryFolder folder_;
  std::vector<Options> options_;
  std::vector<std::unique_ptr<Daemon>> daemons_;
};

// Pages of one sequence: page i names page i - 1 as its parent, and its bytes follow from its key.
class TestSequence {
 public:
  TestSequence(int name, int pages) : name_(name), pages_(pages) {}

  int pages() const { return pages_; }
  PageKey Key(int page) const;
  std::string Keys() const;
  std::vector<std::byte> Fragment(const TestClient& client, int page) const;
  // Commits all pages; how many were stored.
  int Commit(TestClient& client) const;
  // Leases the pages that exist, checks every byte of them, and releases them. -1: a wrong byte.
  int Read(TestClient& client, std::vector<v1::Tier>* tiers = nullptr,
           v1::MissReason* reason = nullptr, uint32_t wait_ms = 2000) const;

 private:
  const int name_;
  const int pages_;
};

}  // namespace crumb::server
