// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/child_process.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <span>
#include <vector>

#include "bench/measure.h"
#include "bench/servers_under_test.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"

namespace crumb::bench {
namespace {

TEST(ChildProcessTest, EndsWithItsOwner) {
  const TemporaryFolder folder;
  pid_t pid = -1;
  {
    auto process = ChildProcess::Start({"sleep", "600"}, folder.File("log"));
    ASSERT_TRUE(process.ok()) << process.status();
    pid = (*process)->pid();
    EXPECT_TRUE((*process)->Running());
    EXPECT_EQ(::kill(pid, 0), 0);
  }
  EXPECT_NE(::kill(pid, 0), 0);
}

TEST(ChildProcessTest, NoticesTheEndAndKeepsTheOutput) {
  const TemporaryFolder folder;
  auto process = ChildProcess::Start({"sh", "-c", "echo out; echo error >&2"}, folder.File("log"));
  ASSERT_TRUE(process.ok()) << process.status();
  while ((*process)->Running()) {
  }
  std::ifstream log(folder.File("log"));
  const std::string text{std::istreambuf_iterator<char>(log), {}};
  EXPECT_EQ(text, "out\nerror\n");
}

TEST(ChildProcessTest, AProgramThatIsNotThereIsNotFound) {
  const TemporaryFolder folder;
  EXPECT_EQ(ChildProcess::Start({"/no/such/program"}, folder.File("log")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(BusyLoopsTest, TakeProcessorTimeUntilTheyAreDestroyed) {
  std::vector<pid_t> pids;
  {
    const auto loops = StartBusyLoops(2);
    ASSERT_TRUE(loops.ok()) << loops.status();
    for (const auto& loop : *loops) pids.push_back(loop->pid());
    ASSERT_EQ(pids.size(), 2u);
    EXPECT_TRUE(Eventually([&] { return CpuSecondsOf(std::span(pids).first(1)) > 0.05; }));
    EXPECT_TRUE(Eventually([&] { return CpuSecondsOf(std::span(pids).last(1)) > 0.05; }));
  }
  for (const pid_t pid : pids) EXPECT_NE(::kill(pid, 0), 0);
}

TEST(ScratchFolderTest, GoesWithEverythingInIt) {
  std::string path;
  {
    const auto folder = ScratchFolder::Create();
    ASSERT_TRUE(folder.ok()) << folder.status();
    path = (*folder)->path();
    std::ofstream(path + "/file") << "x";
    EXPECT_TRUE(std::filesystem::exists(path + "/file"));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(CrumbdUnderTestTest, AProgramThatEndsIsReportedWithItsOutput) {
  CrumbdSettings settings;
  settings.program = "/bin/false";
  const auto crumbd = CrumbdUnderTest::Start(settings);
  EXPECT_EQ(crumbd.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace crumb::bench
