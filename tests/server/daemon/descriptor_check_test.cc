// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/descriptor_check.h"

#include <sys/resource.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

ByteSize MiB(uint64_t count) { return ByteSize{count << 20}; }

Options SmallOptions() {
  Options options;
  options.store.host.bytes_max = MiB(1000);
  options.store.host.slab_bytes = MiB(256);
  options.store.ssd.path = "";
  options.sessions.sessions_max = 10;
  options.limits.connections_max = 7;
  options.device_pools.pools_max = 3;
  options.device_pools.handles_max = 4;
  return options;
}

TEST(DescriptorCheckTest, NeedsFollowTheOptions) {
  Options options = SmallOptions();
  DescriptorNeeds needs = DescriptorNeedsOf(options);
  EXPECT_EQ(needs.slabs, 2 * 2 * 4);  // two of each of 4 slabs, and as many of a process before
  EXPECT_EQ(needs.extents, 0);
  EXPECT_EQ(needs.sessions, 5 * 10);
  EXPECT_EQ(needs.connections, 7);
  EXPECT_EQ(needs.pool_handles, 3 * 4);

  options.store.ssd.path = "/data";
  options.store.ssd.bytes_max = MiB(1024);
  EXPECT_EQ(DescriptorNeedsOf(options).extents, 16);  // a small folder has up to 16 extents
  options.store.ssd.bytes_max = MiB(256 * 40 + 1);
  EXPECT_EQ(DescriptorNeedsOf(options).extents, 41);
}

TEST(DescriptorCheckTest, PoolsAreBoundedByTheirBudget) {
  Options options = SmallOptions();
  options.device_pools.pools_max = 1000;
  options.device_pools.handles_max = 1000;
  options.device_pools.descriptors_max = 50;
  EXPECT_EQ(DescriptorNeedsOf(options).pool_handles, 50);
  // Without a budget pools take half of the limit, so their need equals that of everything else.
  options.device_pools.descriptors_max = 0;
  const DescriptorNeeds needs = DescriptorNeedsOf(options);
  EXPECT_EQ(needs.pool_handles, needs.certain() + needs.sessions + needs.connections);
}

TEST(DescriptorCheckTest, FewerThanTheCertainNeedsIsAnErrorThatNamesTheSetting) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  DescriptorNeeds needs;
  needs.slabs = limit.rlim_max;
  needs.fixed = 1;
  const auto checked = CheckDescriptors(needs);
  EXPECT_EQ(checked.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(checked.status().message()), HasSubstr("store.host.slab_bytes"));
}

TEST(DescriptorCheckTest, MissingDescriptorsOfCallersAreAFinding) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  DescriptorNeeds needs;
  needs.fixed = 1;
  auto checked = CheckDescriptors(needs);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(checked->size(), 1);
  needs.connections = limit.rlim_max;
  checked = CheckDescriptors(needs);
  ASSERT_TRUE(checked.ok()) << checked.status();
  ASSERT_EQ(checked->size(), 2);
  EXPECT_THAT(checked->at(1), HasSubstr("descriptors: 1 are missing"));
}

}  // namespace
}  // namespace crumb::server
