// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "common/fd_channel.h"
#include "common/hex.h"
#include "crumb/v1/session.pb.h"
#include "server/session/fd_listener.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/call_fixture.h"
#include "tests/server/hostile_descriptors.h"

// Descriptors whose close waits, sent to crumbd.fd.sock: none of them delays a session of another
// process, and their use of crumbd's descriptors is bounded.
namespace crumb::server {
namespace {

constexpr int kPatienceSeconds = 10;
constexpr const char* kToken = "a token of a tenant";

class ReceivedDescriptorsTest : public CallFixture {
 protected:
  void Start(const SessionLimits& limits = {}, const SessionTenants& tenants = {}) {
    listener_.reset();
    listener_ =
        FdListener::Start({.path = path_, .limits = limits, .epoch = 42, .tenants = tenants},
                          sessions_, store_, metrics_)
            .value();
  }

  // A socket whose calls do not wait for ever.
  UniqueFd Connect() const {
    UniqueFd socket = ConnectFdChannel(path_).value();
    const timeval patience{.tv_sec = kPatienceSeconds, .tv_usec = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    return socket;
  }

  static std::string Hello(const std::string& token = "") {
    v1::SessionHello hello;
    hello.set_protocol_version(1);
    hello.set_process_name("test");
    hello.set_tenant_token(token);
    return hello.SerializeAsString();
  }

  // Whether crumbd gives the process a session.
  static bool OpensSession(int socket, const std::string& token = "") {
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    const int fds[] = {pidfd.get()};
    if (!SendFdMessage(socket, Hello(token), fds).ok()) return false;
    const auto message = ReceiveFdMessage(socket);
    v1::SessionWelcome welcome;
    return message.ok() && welcome.ParseFromString(message->bytes) && welcome.token().size() == 16;
  }

  // crumbd closes the connection, perhaps behind its response to a hello.
  static bool IsClosed(int socket) {
    auto message = ReceiveFdMessage(socket);
    if (message.ok()) message = ReceiveFdMessage(socket);
    return !message.ok() && message.status().message() == "closed by the peer";
  }

  // Sends a hello whose only descriptor is a socket that lingers; crumbd's close of it waits.
  std::unique_ptr<LingeringSocket> BlockAClose() const {
    std::vector<UniqueFd> sockets;
    return SendLingering([&](int fd) {
      sockets.push_back(Connect());
      EXPECT_TRUE(SendDescriptors(sockets.back().get(), Hello(), {&fd, 1}));
    });
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_.path() + "/crumbd.fd.sock";
  const UniqueFd plain_ = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::unique_ptr<FdListener> listener_;
};

TEST_F(ReceivedDescriptorsTest, OneThatDoesNotCloseHoldsUpNoSession) {
  Start();
  std::vector<std::unique_ptr<LingeringSocket>> hostile;
  for (int i = 0; i < 3; ++i) hostile.push_back(BlockAClose());
  EXPECT_TRUE(Eventually([&] { return metrics_.hellos_refused.value() >= hostile.size(); }));
  const UniqueFd honest = Connect();
  EXPECT_TRUE(OpensSession(honest.get()));
}

// A message may carry more descriptors than the protocol allows, up to the kernel's own bound. The
// last one here is the last reference to its socket once the sender has let go.
TEST_F(ReceivedDescriptorsTest, AsManyAsTheKernelPassesHoldUpNoSession) {
  Start();
  std::vector<UniqueFd> sockets;
  const auto lingers = SendLingering([&](int fd) {
    std::vector<int> fds(kKernelFdsMax, plain_.get());
    fds.back() = fd;
    sockets.push_back(Connect());
    ASSERT_TRUE(SendDescriptors(sockets.back().get(), Hello(), fds));
  });
  const UniqueFd honest = Connect();
  EXPECT_TRUE(OpensSession(honest.get()));
  for (const UniqueFd& hostile : sockets) EXPECT_TRUE(IsClosed(hostile.get()));
}

// The kernel lets go of a descriptor for which there is no number where the message is received.
TEST_F(ReceivedDescriptorsTest, ThoseWithoutANumberHoldUpNoSession) {
  Start();
  UniqueFd open = Connect();
  ASSERT_TRUE(OpensSession(open.get()));
  constexpr int kAboveTheLimits = 200;  // and a number that processes may have
  LingeringSocket lingers(kAboveTheLimits);
  UniqueFd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));  // the lowest number that is free
  UniqueFd second(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto one_free = static_cast<rlim_t>(first.get()) + 1;
  const auto two_free = static_cast<rlim_t>(second.get()) + 1;
  first.Reset();
  second.Reset();
  DescriptorLimit limit;
  limit.Set(one_free);
  const UniqueFd hostile = Connect();  // takes the last number, so it is not accepted yet
  const int fds[] = {lingers.fd()};
  ASSERT_TRUE(SendDescriptors(hostile.get(), Hello(), fds));
  ASSERT_TRUE(lingers.LetGo());
  limit.Set(two_free);  // one descriptor for the connection, none for those that it has sent
  EXPECT_TRUE(Eventually([&] { return metrics_.hellos_refused.value() == 1; }));
  limit.Restore();
  open.Reset();
  EXPECT_TRUE(Eventually([&] { return sessions_.totals().sessions == 0; }));
}

// The bound counts descriptors, not messages.
TEST_F(ReceivedDescriptorsTest, ThoseThatWaitToBeClosedAreBounded) {
  Start();
  const auto lingers = BlockAClose();
  const size_t before = OpenDescriptors();
  const std::vector<int> fds(kFdsPerMessageMax, plain_.get());
  for (int i = 0; i < 30; ++i) {
    const UniqueFd hostile = Connect();
    SendDescriptors(hostile.get(), Hello(), fds);
    EXPECT_TRUE(IsClosed(hostile.get()));
  }
  const size_t bound = 1024 + kKernelFdsMax;
  EXPECT_LT(OpenDescriptors(), before + bound + 40);  // and the sockets of the connections
  lingers->End();
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= before; }));
  const UniqueFd honest = Connect();
  EXPECT_TRUE(OpensSession(honest.get()));
}

// Behind a hello they are counted for the tenant, not for its user.
TEST_F(ReceivedDescriptorsTest, ThoseOfATenantAreBounded) {
  TenantOptions options;
  options.file = folder_.path() + "/tenants.json";
  std::ofstream(options.file) << "{\"tenants\": [{\"name\": \"a\", \"token_sha256\": \""
                              << HexEncode(Sha256(kToken)) << "\"}]}";
  const auto table =
      TenantTable::Open(options, [] { return std::chrono::system_clock::now(); }).value();
  Start({}, {.table = table.get(), .shared_memory = true});
  std::vector<UniqueFd> sockets;
  const auto lingers = SendLingering([&](int fd) {
    sockets.push_back(Connect());
    ASSERT_TRUE(OpensSession(sockets.back().get(), kToken));
    EXPECT_TRUE(SendDescriptors(sockets.back().get(), "no PoolRequest", {&fd, 1}));
  });
  const size_t before = OpenDescriptors();
  const std::vector<int> fds(kFdsPerMessageMax, plain_.get());
  size_t sessions = 0;
  for (int i = 0; i < 30; ++i) {
    const UniqueFd hostile = Connect();
    if (!OpensSession(hostile.get(), kToken)) continue;
    ++sessions;
    SendDescriptors(hostile.get(), "no PoolRequest", fds);
    EXPECT_TRUE(IsClosed(hostile.get()));
  }
  EXPECT_GE(sessions, 1024 / kFdsPerMessageMax);
  EXPECT_LT(sessions, 30u);
  EXPECT_LT(OpenDescriptors(), before + 1024 + kKernelFdsMax + 40);
  // A user without a tenant, here crumbd's own, is another owner.
  const UniqueFd other = Connect();
  EXPECT_TRUE(OpensSession(other.get()));
  lingers->End();
  EXPECT_TRUE(Eventually([&] {
    const UniqueFd again = Connect();
    return OpensSession(again.get(), kToken);
  }));
}

// Connections of a user that blocks closes are accepted, and wait to be closed, until the bound of
// all users is reached. Sessions that are open go on.
TEST_F(ReceivedDescriptorsTest, AcceptingPausesAtTheBoundOfAllUsers) {
  SessionLimits limits;
  limits.handshakes_max = 4;
  limits.closing_max = 10;
  limits.closing_total_max = 40;
  Start(limits);
  const auto lingers = BlockAClose();
  const size_t before = OpenDescriptors();
  const std::vector<int> fds(10, plain_.get());
  std::vector<UniqueFd> hostile;
  for (int i = 0; i < 80; ++i) {
    hostile.push_back(Connect());
    SendDescriptors(hostile.back().get(), Hello(), fds);
  }
  EXPECT_TRUE(Eventually([&] { return metrics_.accept_pauses.value() > 0; }));
  // Beside them: connections without a hello, and the last message.
  EXPECT_LE(OpenDescriptors(), before + hostile.size() + 40 + 4 + fds.size());
  lingers->End();
  EXPECT_TRUE(Eventually([&] {
    const UniqueFd honest = Connect();
    return OpensSession(honest.get());
  }));
}

}  // namespace
}  // namespace crumb::server
