// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/takeover.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <thread>

#include "common/fd_channel.h"
#include "common/mapping.h"
#include "crumb/v1/takeover.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"

namespace crumb::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

class TakeoverTest : public testing::Test {
 protected:
  TakeoverTest() {
    options_.listen.socket_dir = folder_.path();
    options_.store.ssd.path = folder_.path() + "/ssd";
  }
  void Listen() {
    auto listener = TakeoverListener::Start(options_, [this] { requested_.set_value(); });
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }
  UniqueFd Connect() const { return ConnectFdChannel(TakeoverSocket(options_)).value(); }
  // Returns the listener's response to `bytes`.
  std::string ResponseTo(const std::string& bytes) const {
    const UniqueFd socket = Connect();
    EXPECT_TRUE(SendFdMessage(socket.get(), bytes, {}).ok());
    const auto response = ReceiveFdMessage(socket.get());
    EXPECT_TRUE(response.ok()) << response.status();
    v1::TakeoverResponse parsed;
    EXPECT_TRUE(parsed.ParseFromString(response->bytes.substr(0, response->bytes.size() - 1)));
    return parsed.error();
  }
  // The socket of a successor that may have it.
  UniqueFd Successor() {
    requested_.get_future().wait();
    return listener_->TakeSuccessor();
  }
  static storage::HandedOverMemory Memory(uint32_t slabs) {
    storage::HandedOverMemory memory;
    memory.image.slab_bytes = 1 << 20;
    memory.image.slabs = slabs;
    memory.image.records = {{"name", "value"}};
    for (uint32_t i = 0; i < slabs; ++i) {
      memory.slabs.push_back(CreateMemfd("slab-" + std::to_string(i), 4096 + i).value());
    }
    return memory;
  }

  TemporaryFolder folder_;
  Options options_;
  std::promise<void> requested_;
  std::unique_ptr<TakeoverListener> listener_;
};

TEST_F(TakeoverTest, HandsOverImageAndSlabsInOrder) {
  ASSERT_NO_FATAL_FAILURE(Listen());
  auto takeover =
      std::async(std::launch::async, [this] { return TakeOver(options_, seconds(60)); });
  const UniqueFd successor = Successor();
  ASSERT_TRUE(successor.valid());
  listener_.reset();
  const storage::HandedOverMemory memory = Memory(450);  // more than three messages carry
  auto handed = std::async(std::launch::async,
                           [&] { return HandMemoryOver(successor.get(), memory, seconds(60)); });
  auto taken = takeover.get();
  ASSERT_TRUE(taken.ok()) << taken.status();
  ASSERT_NE(taken->memory, nullptr);
  EXPECT_TRUE(taken->memory->image == memory.image);
  ASSERT_EQ(taken->memory->slabs.size(), 450u);
  for (size_t i = 0; i < 450; ++i) {
    struct stat status;
    ASSERT_EQ(::fstat(taken->memory->slabs[i].get(), &status), 0);
    EXPECT_EQ(status.st_size, static_cast<off_t>(4096 + i));
  }
  // A confirmation waits for the predecessor's end; here its socket stays open.
  EXPECT_TRUE(absl::IsDeadlineExceeded(ConfirmTakeover(*std::move(taken), milliseconds(50))));
  const auto pid = handed.get();
  ASSERT_TRUE(pid.ok()) << pid.status();
  EXPECT_EQ(*pid, ::getpid());
}

TEST_F(TakeoverTest, RefusesProcessesThatMayNotTakeOverAndGoesOn) {
  ASSERT_NO_FATAL_FAILURE(Listen());
  struct stat status;
  ASSERT_EQ(::stat(TakeoverSocket(options_).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_THAT(ResponseTo("\xff\xff\xff"), HasSubstr("no TakeoverRequest"));
  v1::TakeoverRequest request;
  request.set_ssd_path(options_.store.ssd.path);
  EXPECT_THAT(ResponseTo(request.SerializeAsString()), HasSubstr("reads images of version 0"));
  request.set_image_version(storage::kHostImageVersion);
  request.set_ssd_path("/elsewhere");
  EXPECT_THAT(ResponseTo(request.SerializeAsString()), HasSubstr("store.ssd.path"));
  { const UniqueFd gone = Connect(); }
  Options other = options_;
  other.store.ssd.path.clear();
  EXPECT_TRUE(absl::IsFailedPrecondition(TakeOver(other, seconds(60)).status()));
  EXPECT_FALSE(listener_->TakeSuccessor().valid());
  // Another path of the same folder is accepted, and a newer reader can read this image.
  request.set_image_version(storage::kHostImageVersion + 5);
  request.set_ssd_path(folder_.path() + "/./x/../ssd");
  EXPECT_EQ(ResponseTo(request.SerializeAsString()), "");
  EXPECT_TRUE(Successor().valid());
}

TEST_F(TakeoverTest, AnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_NO_FATAL_FAILURE(Listen());
  // Even where the folders would let it in.
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0777), 0);
  ASSERT_EQ(::chmod(TakeoverSocket(options_).c_str(), 0777), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool other = ::setgid(65534) == 0 && ::setuid(65534) == 0;
    ::_exit(other && absl::IsFailedPrecondition(TakeOver(options_, seconds(20)).status()) ? 0 : 1);
  }
  int code = -1;
  ASSERT_EQ(::waitpid(child, &code, 0), child);
  EXPECT_EQ(code, 0);
  EXPECT_FALSE(listener_->TakeSuccessor().valid());
}

TEST_F(TakeoverTest, NoCrumbdThere) {
  EXPECT_TRUE(absl::IsNotFound(TakeOver(options_, seconds(1)).status()));
}

TEST_F(TakeoverTest, EachSideLearnsOfTheOthersEnd) {
  ASSERT_NO_FATAL_FAILURE(Listen());
  auto takeover =
      std::async(std::launch::async, [this] { return TakeOver(options_, seconds(60)); });
  { const UniqueFd dies = Successor(); }
  EXPECT_TRUE(absl::IsUnavailable(takeover.get().status()));

  requested_ = {};
  listener_.reset();
  ASSERT_NO_FATAL_FAILURE(Listen());
  auto second = std::async(std::launch::async, [this] { return TakeOver(options_, seconds(60)); });
  const UniqueFd successor = Successor();
  const storage::HandedOverMemory memory = Memory(2);
  auto handed = std::async(std::launch::async,
                           [&] { return HandMemoryOver(successor.get(), memory, seconds(60)); });
  { const auto dies = second.get(); }
  EXPECT_TRUE(absl::IsUnavailable(handed.get().status()));
}

TEST_F(TakeoverTest, WaitsHaveAnEnd) {
  ASSERT_NO_FATAL_FAILURE(Listen());
  auto takeover =
      std::async(std::launch::async, [this] { return TakeOver(options_, milliseconds(50)); });
  const UniqueFd successor = Successor();
  EXPECT_TRUE(absl::IsDeadlineExceeded(takeover.get().status()));

  requested_ = {};
  listener_.reset();
  ASSERT_NO_FATAL_FAILURE(Listen());
  auto silent = std::async(std::launch::async, [this] { return TakeOver(options_, seconds(60)); });
  const UniqueFd other = Successor();
  const storage::HandedOverMemory memory = Memory(1);
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(HandMemoryOver(other.get(), memory, milliseconds(50)).status()));
  EXPECT_TRUE(silent.get().ok());
}

TEST_F(TakeoverTest, AnImageThatCannotBeReadIsNoMemory) {
  ASSERT_NO_FATAL_FAILURE(Listen());
  auto takeover =
      std::async(std::launch::async, [this] { return TakeOver(options_, seconds(60)); });
  const UniqueFd successor = Successor();
  v1::TakeoverMemory announced;
  announced.set_image_bytes(64);
  const UniqueFd image = CreateMemfd("image", 64).value();  // zeros, and nothing seals them
  const int fds[] = {image.get()};
  ASSERT_TRUE(SendFdMessage(successor.get(), announced.SerializeAsString(), fds).ok());
  const auto taken = takeover.get();
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->memory, nullptr);
  EXPECT_TRUE(taken->predecessor.valid());
}

}  // namespace
}  // namespace crumb::server
