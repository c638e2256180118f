// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Three crumbds of one process share pages, over UCX and over gRPC bytes.
#include "server/cluster/cluster.h"

#include <algorithm>
#include <filesystem>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/cluster/test_nodes.h"

namespace crumb::server {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

class ClusterTest : public testing::TestWithParam<bool> {
 protected:
  TestNodes::Settings Settings() const {
    TestNodes::Settings settings;
    settings.ucx = GetParam();
    return settings;
  }
};

INSTANTIATE_TEST_SUITE_P(Planes, ClusterTest, testing::Bool(),
                         [](const auto& plane) { return plane.param ? "Ucx" : "Grpc"; });

// The first node that is no home of the sequence's only run and did not write it.
TEST_P(ClusterTest, APageCommittedOnOneNodeIsHitOnAnother) {
  TestNodes nodes(Settings());
  ASSERT_TRUE(nodes.WaitForView(3));
  // Enough sequences that each node is home of some.
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 8; ++i) sequences.emplace_back(i, 40);
  auto writer = nodes.Connect(0);
  for (const TestSequence& sequence : sequences) EXPECT_EQ(sequence.Commit(*writer), 40);
  EXPECT_TRUE(Eventually([&] {
    const std::string admin = nodes.daemon(0).endpoints().admin;
    return SeriesOf(admin, "crumb_push_queue_pages") == 0;
  }));
  int remote = 0;
  for (int node = 1; node < 3; ++node) {
    auto reader = nodes.Connect(node);
    for (const TestSequence& sequence : sequences) {
      std::vector<v1::Tier> tiers;
      EXPECT_EQ(sequence.Read(*reader, &tiers), 40) << "node " << node;
      remote += static_cast<int>(std::count(tiers.begin(), tiers.end(), v1::TIER_REMOTE));
      // What came is here now.
      EXPECT_EQ(sequence.Read(*reader, &tiers), 40);
      EXPECT_THAT(tiers, Each(v1::TIER_HOST));
    }
  }
  // Two of three nodes did not have what a third is home of; some of it the writer.
  EXPECT_GT(remote, 40);
}

}  // namespace
}  // namespace crumb::server
