// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/unique_fd.h"

// Descriptors that a hostile process sends, and the resources that they take.
namespace crumb::server {

// A TCP socket whose last close waits for its other side, here for longer than a test: SO_LINGER is
// set and bytes are unsent. Any process can make one. A process that sends it, and closes its own
// copy, chooses how long the receiver's close takes.
class LingeringSocket {
 public:
  // Its descriptor's number is `least` or more.
  explicit LingeringSocket(int least = 0) {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    socket_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    peer_ = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger lingers{1, 600};
    EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &lingers, sizeof(lingers)), 0);
    const std::string bytes(1 << 20, 'x');  // more than the peer's buffer takes
    while (::send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
    if (least == 0) return;
    UniqueFd moved(::fcntl(socket_.get(), F_DUPFD_CLOEXEC, least));
    EXPECT_TRUE(moved.valid());
    if (moved.valid()) socket_ = std::move(moved);
  }
  LingeringSocket(const LingeringSocket&) = delete;
  LingeringSocket& operator=(const LingeringSocket&) = delete;
  ~LingeringSocket() { End(); }

  int fd() const { return socket_.get(); }
  // Closes this side's copy. Returns false if it is the last one: then that close waits, on a
  // thread of its own, and no close of a receiver does.
  bool LetGo() {
    closing_ = std::async(std::launch::async, [this] { socket_.Reset(); });
    return closing_.wait_for(std::chrono::milliseconds(500)) == std::future_status::ready;
  }
  // Closes the other side, and ends every close that waits.
  void End() {
    if (!peer_.valid()) return;
    const linger reset{1, 0};
    ::setsockopt(peer_.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    peer_.Reset();
    if (closing_.valid()) closing_.wait();
  }

 private:
  UniqueFd socket_;
  UniqueFd peer_;
  std::future<void> closing_;
};

// Makes a socket that lingers, has `send` send it away, and lets go of it: the receiver's close
// waits until the result ends. `send` is called again if the receiver closes it too early to wait.
inline std::unique_ptr<LingeringSocket> SendLingering(const std::function<void(int)>& send,
                                                      int least = 0) {
  while (true) {
    auto lingers = std::make_unique<LingeringSocket>(least);
    send(lingers->fd());
    if (lingers->LetGo()) return lingers;
  }
}

// The most descriptors that the kernel passes in one message.
inline constexpr size_t kKernelFdsMax = 253;

// Sends one message with any number of descriptors that the kernel passes; SendFdMessage sends only
// as many as the protocol allows. Returns false if the socket takes no message.
inline bool SendDescriptors(int socket, const std::string& bytes, std::span<const int> fds) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(fds.size_bytes()));
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(fds.size_bytes());
  std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) >= 0;
}

// Descriptors of this process.
inline size_t OpenDescriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// Lowers the bound of descriptors of this process for a while.
class DescriptorLimit {
 public:
  DescriptorLimit() { EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0); }
  ~DescriptorLimit() { Restore(); }
  void Set(rlim_t limit) {
    rlimit lowered = before_;
    lowered.rlim_cur = limit;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &lowered), 0);
  }
  void Restore() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_{};
};

}  // namespace crumb::server
