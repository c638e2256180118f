// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/fd_channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <vector>

#include "common/mapping.h"
#include "tests/common/temporary_folder.h"

namespace crumb {
namespace {

class FdChannelTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.File(name); }

  const TemporaryFolder folder_;
};

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST_F(FdChannelTest, PassesBytesAndMemory) {
  auto listener = ListenFdChannel(Path("s"));
  ASSERT_TRUE(listener.ok()) << listener.status();
  auto client = ConnectFdChannel(Path("s"));
  ASSERT_TRUE(client.ok()) << client.status();
  UniqueFd server(::accept(listener->get(), nullptr, nullptr));
  EXPECT_EQ(CredentialsOf(server.get())->pid, ::getpid());

  auto memory = CreateMemfd("test", 4096);
  ASSERT_TRUE(memory.ok());
  auto writable = Mapping::Of(memory->get(), 4096, Mapping::Access::kReadWrite);
  ASSERT_TRUE(writable.ok());
  std::strcpy(reinterpret_cast<char*>(writable->data()), "crumb");
  const int fd = memory->get();
  ASSERT_TRUE(SendFdMessage(server.get(), "here", std::span(&fd, 1)).ok());

  auto message = ReceiveFdMessage(client->get());
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->bytes, "here");
  ASSERT_EQ(message->fds.size(), 1u);
  auto readable = Mapping::Of(message->fds[0].get(), 4096, Mapping::Access::kReadOnly);
  ASSERT_TRUE(readable.ok());
  EXPECT_STREQ(reinterpret_cast<const char*>(readable->data()), "crumb");
}

TEST_F(FdChannelTest, ASealedSlabCannotBeMappedForWriting) {
  auto memory = CreateMemfd("slab", 4096);
  ASSERT_TRUE(memory.ok());
  auto ours = Mapping::Of(memory->get(), 4096, Mapping::Access::kReadWrite);
  ASSERT_TRUE(ours.ok());
  ASSERT_EQ(::fcntl(memory->get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_GROW | F_SEAL_SHRINK),
            0);
  EXPECT_FALSE(Mapping::Of(memory->get(), 4096, Mapping::Access::kReadWrite).ok());
  auto theirs = Mapping::Of(memory->get(), 4096, Mapping::Access::kReadOnly);
  ASSERT_TRUE(theirs.ok());
  ours->data()[7] = std::byte{42};
  EXPECT_EQ(theirs->data()[7], std::byte{42});
}

TEST_F(FdChannelTest, ReportsTheEnd) {
  auto listener = ListenFdChannel(Path("s"));
  auto client = ConnectFdChannel(Path("s"));
  ASSERT_TRUE(client.ok());
  UniqueFd server(::accept(listener->get(), nullptr, nullptr));
  client->Reset();
  EXPECT_EQ(ReceiveFdMessage(server.get()).status().code(), absl::StatusCode::kUnavailable);
}

// Fills the backlog of a listener that accepts nothing.
std::vector<UniqueFd> FillBacklog(const std::string& path) {
  std::vector<UniqueFd> waiting;
  while (true) {
    auto socket = ConnectFdChannel(path, std::chrono::milliseconds(20));
    if (!socket.ok()) return waiting;
    waiting.push_back(*std::move(socket));
  }
}

TEST_F(FdChannelTest, AFullBacklogEndsTheWaitForIt) {
  auto listener = ListenFdChannel(Path("s"));
  ASSERT_TRUE(listener.ok()) << listener.status();
  const std::vector<UniqueFd> waiting = FillBacklog(Path("s"));
  ASSERT_FALSE(waiting.empty());
  EXPECT_EQ(ConnectFdChannel(Path("s"), std::chrono::milliseconds(20)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ListenFdChannel(Path("s")).status().code(), absl::StatusCode::kAlreadyExists)
      << "a listener that accepts nothing is one all the same";
  // A connection that there is room for again is made, and its socket has no timeout.
  std::future<absl::StatusOr<UniqueFd>> late = std::async(
      std::launch::async, [&] { return ConnectFdChannel(Path("s"), std::chrono::seconds(30)); });
  const UniqueFd first(::accept(listener->get(), nullptr, nullptr));
  const absl::StatusOr<UniqueFd> connected = late.get();
  ASSERT_TRUE(connected.ok()) << connected.status();
  timeval timeout{};
  socklen_t size = sizeof(timeout);
  ASSERT_EQ(::getsockopt(connected->get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, &size), 0);
  EXPECT_EQ(timeout.tv_sec, 0);
  EXPECT_EQ(timeout.tv_usec, 0);
}

TEST_F(FdChannelTest, DescriptorsOfARefusedMessageDoNotLeak) {
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
  UniqueFd a(sockets[0]);
  UniqueFd b(sockets[1]);
  const int before = OpenDescriptors();
  std::string large(kFdMessageBytesMax + 1, 'x');
  iovec part{large.data(), large.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int passed = a.get();
  std::memcpy(CMSG_DATA(rights), &passed, sizeof(int));
  ASSERT_GT(::sendmsg(a.get(), &message, 0), 0);
  EXPECT_EQ(ReceiveFdMessage(b.get()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(FdChannelTest, ListeningSaysWhatIsInTheWay) {
  EXPECT_EQ(ListenFdChannel(Path("missing/s")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ListenFdChannel(std::string(200, 'p')).status().code(),
            absl::StatusCode::kInvalidArgument);
  std::ofstream(Path("file")) << "not a socket";
  EXPECT_EQ(ListenFdChannel(Path("file")).status().code(), absl::StatusCode::kFailedPrecondition);
  auto first = ListenFdChannel(Path("s"));
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(ListenFdChannel(Path("s")).status().code(), absl::StatusCode::kAlreadyExists);
  first->Reset();
  EXPECT_TRUE(ListenFdChannel(Path("s")).ok()) << "a dead one's file is replaced";
}

}  // namespace
}  // namespace crumb
