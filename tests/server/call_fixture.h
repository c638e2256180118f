// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "crumb/v1/cache_service.pb.h"
#include "gtest/gtest.h"
#include "server/calls/call_context.h"
#include "server/calls/prefetch_budget.h"
#include "tests/server/memory_store.h"

namespace crumb::server {

// Everything that calls work on, over a memory store, with one keyspace open: 2 layers, 2 heads,
// head_dim 64, groups of 32.
class CallFixture : public testing::Test {
 protected:
  static constexpr Geometry kGeometry{2, 2, 64, 32};

  explicit CallFixture(Limits limits = {}, SessionLimits session_limits = {});
  ~CallFixture() override;

  // A complete INT2 fragment of the keyspace: tiles of `fill`, then the header.
  std::vector<std::byte> Fragment(const PageKey& key, uint8_t fill = 1) const;
  static PageKey Key(int number);
  static std::string Keys(int first, int count);

  uint32_t tiles_bytes() const { return 4 * kGeometry.int2_tile_bytes(); }
  size_t fragment_bytes() const { return FragmentBytes(4, kGeometry.int2_tile_bytes()); }

  // Commits a page past all calls.
  void Store(const PageKey& key);

  std::shared_ptr<Session> OpenSession(uint64_t staging_bytes = 1 << 20,
                                       const std::string& engine = "");

  // Called for each page event, after the hub.
  std::function<void(const storage::PageEvent&)> on_page_;
  Limits limits_;
  ServerMetrics metrics_{4};
  EventHub events_;
  MemoryStore store_;
  std::unique_ptr<KeyspaceRegistry> keyspaces_;
  SessionTable sessions_;
  Executor commits_;
  Executor control_;
  PrefetchBudget prefetches_;
  CallContext context_;
  std::shared_ptr<Keyspace> keyspace_;
};

// A Done that remembers.
struct Completion {
  absl::Status status = absl::UnknownError("not completed");
  int times = 0;
  Done done() {
    return [this](absl::Status result) {
      status = std::move(result);
      ++times;
    };
  }
};

}  // namespace crumb::server
