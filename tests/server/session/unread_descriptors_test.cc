// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/unread_descriptors.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace crumb::server {
namespace {

// Descriptors are sent while the listener stops. The receiver is gone, so that no message stays.
TEST(UnreadDescriptorsTest, SocketsAreDroppedWhileMessagesAreBeingSent) {
  constexpr int kMessages = 20'000;
  std::atomic<int> dropped = 0;
  UnreadDescriptors unread(1024, [&](const std::string&, const UnreadDescriptors::Socket& socket) {
    EXPECT_NE(socket, nullptr);
    ++dropped;
  });
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  ::close(ends[1]);
  const auto socket = std::make_shared<const UniqueFd>(ends[0]);
  std::atomic<bool> sending = true;
  std::thread sender([&] {
    const int fd = STDIN_FILENO;
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_FALSE(unread.Send("user", socket, "message", {&fd, 1}).ok());
    }
    sending = false;
  });
  while (sending) unread.Clear();
  sender.join();
  unread.Clear();
  EXPECT_EQ(unread.used(), 0u);
  EXPECT_GT(dropped, 0);
  EXPECT_EQ(socket.use_count(), 1);
}

}  // namespace
}  // namespace crumb::server
