// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/child_process.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "bench/servers_under_test.h"
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
