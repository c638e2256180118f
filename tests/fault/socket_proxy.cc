// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/socket_proxy.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstring>
#include <utility>

#include "gtest/gtest.h"

namespace crumb::fault {
namespace {

UniqueFd NewSocket() { return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  EXPECT_LT(path.size(), sizeof(address.sun_path));
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

}  // namespace

SocketProxy::SocketProxy(std::string path, std::string target)
    : target_(std::move(target)), listening_(NewSocket()) {
  const sockaddr_un address = AddressOf(path);
  EXPECT_EQ(::bind(listening_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
            0);
  EXPECT_EQ(::listen(listening_.get(), 16), 0);
  thread_ = Thread("proxy", [this] { Accept(); });
}

SocketProxy::~SocketProxy() {
  stopping_.store(true);
  ::shutdown(listening_.get(), SHUT_RDWR);
  thread_.Join();
  Cut();
}

void SocketProxy::Accept() {
  while (!stopping_.load()) {
    UniqueFd client(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!client.valid()) continue;
    UniqueFd target = NewSocket();
    const sockaddr_un address = AddressOf(target_);
    if (::connect(target.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
        0) {
      continue;  // no process listens: the client sees an end
    }
    MutexLock lock(&mutex_);
    Passing& passing = passing_.emplace_back();
    passing.client = std::move(client);
    passing.target = std::move(target);
    const int a = passing.client.get(), b = passing.target.get();
    passing.to_target = Thread("to-target", [a, b] { Pass(a, b, nullptr); });
    passing.to_client =
        Thread("to-client", [a, b, swallow = &passing.swallow] { Pass(b, a, swallow); });
  }
}

void SocketProxy::Pass(int from, int to, const std::atomic<bool>* swallow) {
  std::array<char, 65536> buffer;
  while (true) {
    const ssize_t size = ::recv(from, buffer.data(), buffer.size(), 0);
    if (size <= 0) break;
    if (swallow != nullptr && swallow->load()) continue;
    for (ssize_t sent = 0; sent < size;) {
      const ssize_t more =
          ::send(to, buffer.data() + sent, static_cast<size_t>(size - sent), MSG_NOSIGNAL);
      if (more <= 0) break;
      sent += more;
    }
  }
  ::shutdown(to, SHUT_RDWR);
}

void SocketProxy::SwallowResponses() {
  MutexLock lock(&mutex_);
  for (Passing& passing : passing_) passing.swallow.store(true);
}

void SocketProxy::Cut() {
  std::list<Passing> ended;
  {
    MutexLock lock(&mutex_);
    ended.swap(passing_);
  }
  for (Passing& passing : ended) {
    ::shutdown(passing.client.get(), SHUT_RDWR);
    ::shutdown(passing.target.get(), SHUT_RDWR);
  }
  ended.clear();  // joins their threads, then closes
}

}  // namespace crumb::fault
