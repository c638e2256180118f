// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/calls_workload.h"

#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"

namespace crumb::bench {
namespace {

TEST(CallsWorkloadTest, EveryClientsCallsAreCounted) {
  TemporaryFolder folder;
  fault::CrumbdProcess crumbd(folder.path(), {});
  ASSERT_TRUE(crumbd.Start());
  CallsWorkload workload;
  workload.socket_dir = folder.path();
  workload.clients = {1, 3};
  workload.pages = 40;
  workload.beside_pages = 100;
  workload.duration = std::chrono::milliseconds(100);
  const auto rows = RunCallsWorkload(workload);
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(rows->size(), 2u);
  for (const CallsRow& row : *rows) {
    EXPECT_EQ(row.clients, workload.clients[static_cast<size_t>(&row - rows->data())]);
    EXPECT_GT(row.calls, 0u);
    EXPECT_GT(row.calls_per_second, 0.0);
    EXPECT_GT(row.p50_us, 0.0);
    EXPECT_GE(row.p99_us, row.p50_us);
    EXPECT_GE(row.max_us, row.p99_us);
  }
  EXPECT_NE(CallsText(*rows).find("calls/s"), std::string::npos);
  EXPECT_NE(CallsJson(*rows).find("\"clients\": 3"), std::string::npos);
}

TEST(CallsWorkloadTest, SaysThatThereIsNoCrumbd) {
  TemporaryFolder folder;
  CallsWorkload workload;
  workload.socket_dir = folder.path();
  EXPECT_EQ(RunCallsWorkload(workload).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace crumb::bench
