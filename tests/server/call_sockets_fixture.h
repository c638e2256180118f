// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>

#include "server/base/owner_tasks.h"
#include "server/calls/call_sockets.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {

// A session with one socket for calls, whose process the test plays, over a store with the pages
// Key(0) to Key(7).
class CallSocketsTest : public CallFixture {
 protected:
  static constexpr int kPatienceMs = 20'000;

  CallSocketsTest() {
    for (int i = 0; i < 8; ++i) Store(Key(i));
  }

  void Start(const CallSockets::Options& options = {}) {
    calls_ = CallSockets::Start(context_, options).value();
    session_ = OpenSession();
    opened_ = Open(session_);
  }

  CallPlane::Opened Open(const std::shared_ptr<Session>& session) {
    return calls_->Open(session, closing_, "user").value();
  }

  v1::SocketCall Call(uint64_t number, int first, int count) const {
    v1::SocketCall call;
    call.set_timeout_us(uint64_t{60} * 1'000'000);
    call.mutable_acquire()->set_request(number);
    call.mutable_acquire()->set_keyspace(std::string(keyspace_->id.view()));
    call.mutable_acquire()->set_keys(Keys(first, count));
    return call;
  }

  static void Send(int socket, const std::string& bytes) {
    EXPECT_EQ(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void Send(const v1::SocketCall& call) { Send(opened_.socket.get(), call.SerializeAsString()); }

  // Bytes of the next message; 0: the end.
  static ssize_t Receive(int socket, std::string* bytes) {
    bytes->resize(kCallMessageBytesMax);
    pollfd waiting{socket, POLLIN, 0};
    EXPECT_EQ(::poll(&waiting, 1, kPatienceMs), 1);
    const ssize_t size = ::recv(socket, bytes->data(), bytes->size(), MSG_DONTWAIT);
    bytes->resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
    return size;
  }
  v1::SocketResponse Receive() {
    std::string bytes;
    v1::SocketResponse response;
    EXPECT_GT(Receive(opened_.socket.get(), &bytes), 0);
    EXPECT_TRUE(response.ParseFromString(bytes));
    return response;
  }
  static bool IsClosed(int socket) {
    std::string bytes;
    return Receive(socket, &bytes) <= 0;
  }
  size_t leases() const { return static_cast<size_t>(store_.Stats().leases); }

  const std::shared_ptr<OwnerTasks> closing_ =
      std::make_shared<OwnerTasks>(OwnerTasks::Options{.name = "closing"});
  std::unique_ptr<CallSockets> calls_;
  std::shared_ptr<Session> session_;
  CallPlane::Opened opened_;
};

}  // namespace crumb::server
