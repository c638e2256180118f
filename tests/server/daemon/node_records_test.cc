// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/node_records.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"

namespace crumb::server {
namespace {

class DeletionEpochsTest : public testing::Test {
 protected:
  // A crumbd that starts and serves.
  storage::DeletionEpochs Start(bool takes_over = false) {
    const auto epochs = NextEpochs(path_, takes_over);
    EXPECT_TRUE(epochs.ok()) << epochs.status();
    const absl::Status written = WriteEpochs(path_, *epochs);
    EXPECT_TRUE(written.ok()) << written;
    return *epochs;
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_.path() + "/crumbd.epochs";
};

TEST_F(DeletionEpochsTest, EachOneKnowsTheOneBefore) {
  const auto first = Start();
  const auto second = Start();
  const auto third = Start();
  EXPECT_TRUE(second.Knows(first.current));
  EXPECT_TRUE(third.Knows(second.current));
  EXPECT_TRUE(third.Knows(third.current));
  EXPECT_FALSE(third.Knows(first.current));
  EXPECT_FALSE(third.Knows(0)) << "a roster without an epoch";
}

TEST_F(DeletionEpochsTest, ATakeoverGoesOn) {
  const auto first = Start();
  const auto second = Start();
  const auto successor = Start(/*takes_over=*/true);
  EXPECT_EQ(successor.current, second.current);
  EXPECT_TRUE(successor.Knows(first.current));
}

TEST_F(DeletionEpochsTest, AStartThatFailsChangesNothing) {
  const auto first = Start();
  EXPECT_TRUE(NextEpochs(path_, false).ok());
  EXPECT_TRUE(Start().Knows(first.current));
}

TEST_F(DeletionEpochsTest, NothingIsKnownFromADamagedFile) {
  const auto first = Start();
  for (const char* content : {"", "12", "0 5", "5 0", "x y", "99999999999999999999999 1"}) {
    std::ofstream(path_) << content;
    const auto next = NextEpochs(path_, true);
    ASSERT_TRUE(next.ok()) << content;
    EXPECT_FALSE(next->Knows(first.current)) << content;
    EXPECT_FALSE(next->Knows(0)) << content;
    EXPECT_NE(next->current, next->previous);
  }
}

// Simulates a full disk.
TEST_F(DeletionEpochsTest, WithoutTheFileTheNextOneKnowsNothing) {
  const auto first = Start();
  std::filesystem::create_directory(path_ + ".tmp." +
                                    std::to_string(::getpid()));  // nothing can be written there
  const auto second = Start();
  EXPECT_TRUE(second.Knows(first.current));
  const auto third = Start();
  EXPECT_FALSE(third.Knows(first.current)) << "as if the second one had not been";
  EXPECT_FALSE(third.Knows(second.current));
}

TEST_F(DeletionEpochsTest, AFileThatStaysIsAnError) {
  std::filesystem::create_directories(path_ + "/folder");
  EXPECT_FALSE(WriteEpochs(path_, {5, 4}).ok());
}

}  // namespace
}  // namespace crumb::server
