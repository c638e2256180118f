// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/fd_listener.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <random>

#include "common/fd_channel.h"
#include "common/recent_log.h"
#include "common/roster.h"
#include "crumb/v1/call_socket.pb.h"
#include "crumb/v1/session.pb.h"
#include "gmock/gmock.h"
#include "server/calls/call_sockets.h"
#include "server/device/device_pools.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/call_fixture.h"
#include "tests/server/hostile_descriptors.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

UniqueFd PidfdOf(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

v1::SessionHello Hello(uint64_t staging_bytes = 64 << 10) {
  v1::SessionHello hello;
  hello.set_protocol_version(1);
  hello.set_process_name("test");
  hello.set_staging_bytes(staging_bytes);
  return hello;
}

SessionLimits ShortPatience() {
  SessionLimits limits;
  limits.handshakes_max = 4;
  limits.hello_timeout = std::chrono::milliseconds(200);
  return limits;
}

class FdListenerTest : public CallFixture {
 protected:
  FdListenerTest() : CallFixture({}, ShortPatience()) {
    listener_ =
        FdListener::Start({path_, ShortPatience(), 42}, sessions_, store_, metrics_).value();
  }

  UniqueFd Connect() const { return ConnectFdChannel(path_).value(); }

  // Sends a hello with our own pidfd and returns the response.
  v1::SessionWelcome Greet(int socket, const std::string& bytes, std::span<const int> fds,
                           std::vector<UniqueFd>* received = nullptr) const {
    v1::SessionWelcome welcome;
    if (!SendFdMessage(socket, bytes, fds).ok()) return welcome;
    auto message = ReceiveFdMessage(socket);
    if (!message.ok()) return welcome;
    EXPECT_TRUE(welcome.ParseFromString(message->bytes));
    if (received != nullptr) *received = std::move(message->fds);
    return welcome;
  }
  v1::SessionWelcome Greet(int socket, const v1::SessionHello& hello = Hello()) const {
    const UniqueFd pidfd = PidfdOf(::getpid());
    const int fds[] = {pidfd.get()};
    return Greet(socket, hello.SerializeAsString(), fds);
  }

  // The socket is closed by the other side.
  static bool IsClosed(int socket) {
    pollfd waiting{socket, POLLIN, 0};
    return ::poll(&waiting, 1, 10'000) == 1 && !ReceiveFdMessage(socket).ok();
  }

  // No session comes of it: a response with an error, or the end of the connection.
  bool IsRefused(const std::string& bytes, const std::vector<int>& fds) const {
    const UniqueFd socket = Connect();
    const v1::SessionWelcome welcome = Greet(socket.get(), bytes, fds);
    return welcome.token().empty() && IsClosed(socket.get());
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_.path() + "/crumbd.fd.sock";
  std::unique_ptr<FdListener> listener_;
};

TEST_F(FdListenerTest, AHelloGetsTokenStagingAndSlabs) {
  const UniqueFd socket = Connect();
  const UniqueFd pidfd = PidfdOf(::getpid());
  const int fds[] = {pidfd.get()};
  std::vector<UniqueFd> received;
  const v1::SessionWelcome welcome =
      Greet(socket.get(), Hello().SerializeAsString(), fds, &received);
  EXPECT_EQ(welcome.error(), "");
  EXPECT_EQ(welcome.token().size(), 16u);
  EXPECT_EQ(welcome.engine().size(), 16u);
  EXPECT_EQ(welcome.epoch(), 42u);
  EXPECT_EQ(welcome.staging_bytes(), 64u << 10);
  EXPECT_EQ(welcome.slab_count(), 1u);
  ASSERT_EQ(received.size(), 2u);
  const auto session = sessions_.Find(welcome.token());
  ASSERT_NE(session, nullptr);
  // crumbd sees the bytes that are written there.
  const Mapping mine =
      Mapping::Of(received[0].get(), 64 << 10, Mapping::Access::kReadWrite).value();
  uint64_t offset = 0;
  ASSERT_TRUE(session->staging()->Reserve(100, offset));
  mine.data()[offset] = std::byte{99};
  EXPECT_EQ(StagingArea::Take(session->staging(), offset)->bytes()[0], std::byte{99});
}

TEST_F(FdListenerTest, AHelloThatRequestsOneGetsASocketForCalls) {
  const auto calls = CallSockets::Start(context_, {}).value();
  listener_.reset();
  listener_ = FdListener::Start(
                  {.path = path_, .limits = ShortPatience(), .epoch = 42, .calls = calls.get()},
                  sessions_, store_, metrics_)
                  .value();
  const UniqueFd pidfd = PidfdOf(::getpid());
  const int fds[] = {pidfd.get()};
  std::vector<UniqueFd> received;
  const UniqueFd older = Connect();
  EXPECT_FALSE(Greet(older.get(), Hello().SerializeAsString(), fds, &received).call_socket());
  EXPECT_EQ(received.size(), 2u);
  v1::SessionHello hello = Hello();
  hello.set_call_socket(true);
  UniqueFd socket = Connect();
  EXPECT_TRUE(Greet(socket.get(), hello.SerializeAsString(), fds, &received).call_socket());
  ASSERT_EQ(received.size(), 3u);
  v1::SocketCall call;
  call.mutable_acquire()->set_request(5);
  const std::string bytes = call.SerializeAsString();
  ASSERT_EQ(::send(received[2].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  auto message = ReceiveFdMessage(received[2].get());
  v1::SocketResponse response;
  ASSERT_TRUE(message.ok() && response.ParseFromString(message->bytes));
  EXPECT_EQ(response.request(), 5u);
  EXPECT_EQ(response.code(), static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
  // It goes with the session's connection.
  socket.Reset();
  EXPECT_TRUE(IsClosed(received[2].get()));
  listener_.reset();
}

TEST_F(FdListenerTest, AHelloThatRequestsOneGetsASocketForStagingCalls) {
  const auto calls = CallSockets::Start(context_, {}).value();
  const auto staging = CallSockets::Start(context_, {}).value();
  listener_.reset();
  listener_ = FdListener::Start({.path = path_,
                                 .limits = ShortPatience(),
                                 .epoch = 42,
                                 .calls = calls.get(),
                                 .staging_calls = staging.get()},
                                sessions_, store_, metrics_)
                  .value();
  const UniqueFd pidfd = PidfdOf(::getpid());
  const int fds[] = {pidfd.get()};
  std::vector<UniqueFd> received;
  v1::SessionHello hello = Hello();
  hello.set_call_socket(true);
  hello.set_staging_socket(true);
  UniqueFd socket = Connect();
  const v1::SessionWelcome both = Greet(socket.get(), hello.SerializeAsString(), fds, &received);
  EXPECT_TRUE(both.call_socket() && both.staging_socket());
  ASSERT_EQ(received.size(), 4u);
  v1::SocketCall call;
  call.set_request(5);
  call.mutable_reserve()->set_count(1);
  call.mutable_reserve()->set_fragment_bytes(512);
  const std::string bytes = call.SerializeAsString();
  ASSERT_EQ(::send(received[3].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  const auto message = ReceiveFdMessage(received[3].get());
  v1::SocketResponse response;
  ASSERT_TRUE(message.ok() && response.ParseFromString(message->bytes));
  EXPECT_EQ(response.request(), 5u);
  EXPECT_EQ(response.reserve().offsets_size(), 1);
  const std::vector<UniqueFd> sockets = std::move(received);
  socket.Reset();  // both go with the session's connection
  EXPECT_TRUE(IsClosed(sockets[2].get()));
  EXPECT_TRUE(IsClosed(sockets[3].get()));
  // A session without staging memory has nothing to reserve.
  hello.set_staging_bytes(0);
  const UniqueFd reader = Connect();
  EXPECT_FALSE(Greet(reader.get(), hello.SerializeAsString(), fds, &received).staging_socket());
  EXPECT_EQ(received.size(), 2u);
  listener_.reset();
}

TEST_F(FdListenerTest, ProcessesJoinAnEngine) {
  const UniqueFd first = Connect();
  const v1::SessionWelcome a = Greet(first.get());
  v1::SessionHello hello = Hello(0);
  hello.set_engine(a.engine());
  const UniqueFd second = Connect();
  const v1::SessionWelcome b = Greet(second.get(), hello);
  EXPECT_EQ(b.engine(), a.engine());
  EXPECT_NE(b.token(), a.token());
  EXPECT_EQ(b.staging_bytes(), 0u);
  hello.set_engine(std::string(16, 'n'));
  const UniqueFd third = Connect();
  const v1::SessionWelcome c = Greet(third.get(), hello);  // an id that its processes agreed on
  EXPECT_EQ(c.error(), "");
  EXPECT_EQ(c.engine(), std::string(16, 'n'));
  hello.set_engine("short");
  const UniqueFd fourth = Connect();
  EXPECT_THAT(Greet(fourth.get(), hello).error(), HasSubstr("16"));
}

TEST_F(FdListenerTest, HostileHellosAreRefusedAndLeakNothing) {
  const UniqueFd pidfd = PidfdOf(::getpid());
  const UniqueFd plain(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const pid_t sleeper = ::fork();
  if (sleeper == 0) {
    ::pause();
    ::_exit(0);
  }
  const UniqueFd others = PidfdOf(sleeper);
  v1::SessionHello future = Hello();
  future.set_protocol_version(2);
  v1::SessionHello odd_engine = Hello();
  odd_engine.set_engine("odd");
  const std::string good = Hello().SerializeAsString();
  std::mt19937 random(11);
  std::string garbage(1000, '\0');
  for (char& c : garbage) c = static_cast<char>(random());
  struct Case {
    std::string bytes;
    std::vector<int> fds;
  };
  const std::vector<Case> cases = {
      {good, {}},
      {good, {plain.get()}},
      {good, {others.get()}},
      {good, {pidfd.get(), pidfd.get()}},
      {good, std::vector<int>(kFdsPerMessageMax, plain.get())},
      {garbage, {pidfd.get()}},
      {std::string(kFdMessageBytesMax, 'x'), {pidfd.get()}},
      {future.SerializeAsString(), {pidfd.get()}},
      {odd_engine.SerializeAsString(), {pidfd.get()}},
  };
  ASSERT_TRUE(IsRefused(cases[0].bytes, cases[0].fds));  // creates everything that is created once
  const size_t before = OpenDescriptors();  // descriptors that are being closed count too
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_TRUE(IsRefused(cases[i].bytes, cases[i].fds)) << "case " << i;
  }
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= before; }));
  EXPECT_EQ(sessions_.totals().sessions, 0u);
  ::kill(sleeper, SIGKILL);
  ::waitpid(sleeper, nullptr, 0);
  // A process that has ended cannot hold a session.
  EXPECT_TRUE(IsRefused(good, {others.get()}));
}

TEST_F(FdListenerTest, SilentConnectionsBlockNoOtherAndAreDropped) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(Connect());
  const UniqueFd good = Connect();
  EXPECT_EQ(Greet(good.get()).error(), "");
  for (const UniqueFd& socket : silent) EXPECT_TRUE(IsClosed(socket.get()));
  EXPECT_EQ(metrics_.hellos_refused.value(), 20u);
}

TEST_F(FdListenerTest, AProcessThatNeverReadsBlocksNoOther) {
  std::vector<UniqueFd> deaf;
  const UniqueFd pidfd = PidfdOf(::getpid());
  const int fds[] = {pidfd.get()};
  for (int i = 0; i < 50; ++i) {
    deaf.push_back(Connect());
    ASSERT_TRUE(SendFdMessage(deaf.back().get(), Hello(0).SerializeAsString(), fds).ok());
  }
  const UniqueFd good = Connect();
  EXPECT_EQ(Greet(good.get()).error(), "");
}

TEST_F(FdListenerTest, AClosedConnectionEndsTheSessionOfALivingProcess) {
  UniqueFd socket = Connect();
  const v1::SessionWelcome welcome = Greet(socket.get());
  const size_t with_session = OpenDescriptors();
  socket.Reset();
  EXPECT_TRUE(Eventually([&] { return sessions_.totals().sessions == 0; }));
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() < with_session - 1; }));
  EXPECT_EQ(sessions_.Find(welcome.token()), nullptr);
}

TEST_F(FdListenerTest, LeasesOutliveAClosedConnectionUntilReleased) {
  Store(Key(1));
  UniqueFd socket = Connect();
  const v1::SessionWelcome welcome = Greet(socket.get());
  const auto session = sessions_.Find(welcome.token());
  ASSERT_EQ(session->engine().TakeBudget(1), 1u);
  ASSERT_TRUE(session->engine().AddLease(5, 1, 1, session->token()));
  const size_t with_session = OpenDescriptors();
  socket.Reset();
  ASSERT_TRUE(Eventually([&] { return session->phase() == Session::Phase::kDisconnected; }));
  EXPECT_EQ(sessions_.totals().leases, 1u);
  EXPECT_TRUE(sessions_.Release(*session, 5));
  EXPECT_EQ(sessions_.totals().sessions, 0u);
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() < with_session - 2; }));
}

// A worker that opens a session, reserves, leases through the parent's calls, and is killed.
TEST_F(FdListenerTest, AKilledWorkerLeavesNothingBehind) {
  for (int i = 0; i < 4; ++i) Store(Key(i));
  for (int round = 0; round < 20; ++round) {
    int report[2];
    ASSERT_EQ(::pipe(report), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const UniqueFd socket = ConnectFdChannel(path_).value();
      const UniqueFd pidfd = PidfdOf(::getpid());
      const int fds[] = {pidfd.get()};
      const v1::SessionWelcome welcome = Greet(socket.get(), Hello().SerializeAsString(), fds);
      [[maybe_unused]] const ssize_t sent =
          ::write(report[1], welcome.token().data(), welcome.token().size());
      ::pause();
      ::_exit(0);
    }
    std::string token(16, '\0');
    ASSERT_EQ(::read(report[0], token.data(), token.size()), 16);
    ::close(report[0]);
    ::close(report[1]);
    const auto session = sessions_.Find(token);
    ASSERT_NE(session, nullptr);
    uint64_t offset = 0;
    ASSERT_TRUE(session->staging()->Reserve(5000, offset));
    storage::AcquireRequest request;
    request.keyspace = keyspace_->id;
    request.generation = 1;
    request.keys = {Key(0), Key(1)};
    ASSERT_EQ(session->engine().TakeBudget(2), 2u);
    store_.Acquire(request, [&](absl::StatusOr<storage::AcquireResult> result) {
      ASSERT_TRUE(
          session->engine().AddLease(result->lease, result->hit_pages, 2, session->token()));
    });
    EXPECT_EQ(store_.Stats().leases, 1u);
    EXPECT_EQ(sessions_.totals().reservations, 1u);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ASSERT_TRUE(Eventually([&] { return sessions_.totals().sessions == 0; }));
    ASSERT_TRUE(Eventually([&] { return store_.Stats().leases == 0; }));
    EXPECT_EQ(sessions_.totals().reservations, 0u);
    EXPECT_EQ(sessions_.totals().staging_bytes, 0u);
  }
  EXPECT_EQ(metrics_.sessions_reaped.value(), 20u);
  EXPECT_EQ(metrics_.leases_reaped.value(), 20u);
}

TEST_F(FdListenerTest, ASecondDaemonIsRefusedAndAStaleSocketReplaced) {
  EXPECT_EQ(FdListener::Start({path_, {}, 1}, sessions_, store_, metrics_).status().code(),
            absl::StatusCode::kAlreadyExists);
  listener_.reset();
  EXPECT_FALSE(std::filesystem::exists(path_));
  { const UniqueFd stale = ListenFdChannel(path_).value(); }
  ASSERT_TRUE(std::filesystem::exists(path_));
  EXPECT_TRUE(FdListener::Start({path_, {}, 1}, sessions_, store_, metrics_).ok());
  EXPECT_EQ(FdListener::Start({folder_.path() + "/none/x.sock", {}, 1}, sessions_, store_, metrics_)
                .status()
                .code(),
            absl::StatusCode::kNotFound);
}

double CpuSeconds() {
  timespec used{};
  EXPECT_EQ(::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used), 0);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

TEST_F(FdListenerTest, WithoutDescriptorsNewSessionsWaitAndNothingSpins) {
  const UniqueFd pidfd = PidfdOf(::getpid());
  const int fds[] = {pidfd.get()};
  DescriptorLimit limit;
  UniqueFd lowest(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  limit.Set(static_cast<rlim_t>(lowest.get()) + 1);
  lowest.Reset();
  const UniqueFd socket = Connect();  // takes the last
  ASSERT_TRUE(SendFdMessage(socket.get(), Hello().SerializeAsString(), fds).ok());
  const double cpu = CpuSeconds();
  const TimePoint begin = Clock::Real().Now();
  ASSERT_TRUE(Eventually([&] { return metrics_.accept_pauses.value() >= 10; }));
  const double spent = CpuSeconds() - cpu;
  EXPECT_LT(spent, 0.5 * SecondsBetween(begin, Clock::Real().Now()));
  limit.Restore();
  const auto message = ReceiveFdMessage(socket.get());
  v1::SessionWelcome welcome;
  ASSERT_TRUE(message.ok()) << message.status();
  ASSERT_TRUE(welcome.ParseFromString(message->bytes));
  EXPECT_EQ(welcome.error(), "");
}

// Processes that connect, are silent, and connect again, until they are killed.
class Flood {
 public:
  Flood(const std::string& path, uid_t user) {
    child_ = ::fork();
    if (child_ != 0) return;
    if (user != 0 && ::setuid(user) != 0) ::_exit(1);
    std::vector<UniqueFd> sockets(300);
    for (size_t next = 0;; ++next) {
      auto socket = ConnectFdChannel(path);
      if (socket.ok()) sockets[next % sockets.size()] = *std::move(socket);
    }
  }
  ~Flood() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }

 private:
  pid_t child_ = -1;
};

// A user's flood closes no connection that says hello, be it of another user or of its own.
class FloodTest : public FdListenerTest, public testing::WithParamInterface<uid_t> {
 protected:
  void SetUp() override {
    if (GetParam() != 0 && ::geteuid() != 0) GTEST_SKIP() << "needs root";
    listener_.reset();
    listener_ =
        FdListener::Start({path_, SessionLimits(), 42}, sessions_, store_, metrics_).value();
    ASSERT_EQ(::chmod(folder_.path().c_str(), 0755), 0);
    ASSERT_EQ(::chmod(path_.c_str(), 0666), 0);
  }
};

INSTANTIATE_TEST_SUITE_P(Users, FloodTest, testing::Values(uid_t{0}, uid_t{65534}));

TEST_P(FloodTest, HonestHandshakesAreServed) {
  const Flood flood(path_, GetParam());
  ASSERT_TRUE(Eventually([&] { return metrics_.hellos_refused.value() > 100; }));
  for (int i = 0; i < 5; ++i) {
    const UniqueFd honest = Connect();
    const v1::SessionWelcome welcome = Greet(honest.get(), Hello(0));
    EXPECT_EQ(welcome.token().size(), 16u) << "handshake " << i;
  }
}

TEST_F(FdListenerTest, RefusedHellosDoNotFloodTheLog) {
  const uint64_t before = RecentLog::Process().Count(Severity::kWarning);
  constexpr int kHellos = 1000;
  v1::SessionHello hello = Hello();
  hello.set_protocol_version(99);
  for (int i = 0; i < kHellos; ++i) {
    const UniqueFd socket = Connect();
    EXPECT_NE(Greet(socket.get(), hello).error(), "");
  }
  EXPECT_LT(RecentLog::Process().Count(Severity::kWarning) - before, kHellos / 2);
}

// With a device tier; the sessions' sockets carry PoolRequests.
class FdListenerPoolsTest : public FdListenerTest {
 protected:
  FdListenerPoolsTest()
      : tier_({.device = {}, .is_below = [](const storage::FragmentMeta&) { return false; }},
              Clock::Real(), {}) {}
  ~FdListenerPoolsTest() override { listener_.reset(); }

  void Start() {
    listener_.reset();
    pools_ = std::make_unique<DevicePools>(PoolOptions(), &tier_, Clock::Real(), metrics_);
    sessions_.SetMemory(pools_.get());
    listener_ = FdListener::Start(
                    {.path = path_, .limits = ShortPatience(), .epoch = 42, .pools = pools_.get()},
                    sessions_, store_, metrics_)
                    .value();
  }
  static v1::PoolRequest JoinRequest() {
    v1::PoolRequest request;
    request.mutable_join()->set_device(std::string(16, 'd'));
    request.mutable_join()->set_slot_bytes(4096);
    request.mutable_join()->set_handle_bytes(4096);
    return request;
  }
  // Returns a response of code kUnavailable if none arrives.
  static v1::PoolResponse Call(int socket, const v1::PoolRequest& request,
                               std::span<const int> fds = {}) {
    v1::PoolResponse response;
    response.set_code(static_cast<uint32_t>(absl::StatusCode::kUnavailable));
    if (!SendFdMessage(socket, request.SerializeAsString(), fds).ok()) return response;
    const auto message = ReceiveFdMessage(socket);
    if (!message.ok()) return response;
    EXPECT_TRUE(response.ParseFromString(message->bytes));
    return response;
  }

  // Reads until so many descriptors have come, or the socket's end. Returns how many.
  static size_t ReadDescriptors(int socket, size_t wanted) {
    size_t count = 0;
    while (count < wanted) {
      const auto message = ReceiveFdMessage(socket);
      if (!message.ok()) break;
      count += message->fds.size();
    }
    return count;
  }

  storage::DeviceTier tier_;
  std::unique_ptr<DevicePools> pools_;
};

// Sessions are opened, and files as the SSD tier opens them, when a process has given all the
// handles that it may.
TEST_F(FdListenerPoolsTest, AllHandlesLeaveDescriptorsForSessionsAndExtents) {
  DescriptorLimit limit;
  const size_t open = OpenDescriptors();
  limit.Set(2 * open + 200);
  Start();
  const UniqueFd greedy = Connect();
  ASSERT_EQ(Greet(greedy.get()).error(), "");
  const v1::PoolResponse joined = Call(greedy.get(), JoinRequest());
  ASSERT_EQ(joined.code(), 0u) << joined.error();
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(joined.pool());
  const UniqueFd handle = CreateRoster().value();  // any memory file
  const int fds[] = {handle.get()};
  int taken = 0;
  uint32_t code = 0;
  while ((code = Call(greedy.get(), offer, fds).code()) == 0) ++taken;
  EXPECT_EQ(code, static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  EXPECT_GE(taken, 90);
  std::vector<UniqueFd> extents;
  for (int i = 0; i < 32; ++i) {
    const std::string path = folder_.path() + "/" + std::to_string(i);
    extents.emplace_back(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    EXPECT_TRUE(extents.back().valid()) << "extent " << i;
  }
  for (int i = 0; i < 5; ++i) {
    const UniqueFd honest = Connect();
    EXPECT_EQ(Greet(honest.get()).token().size(), 16u) << "session " << i;
  }
}

// A process that reads no responses has descriptors on their way to it, of which the kernel allows
// crumbd's user RLIMIT_NOFILE.
TEST_F(FdListenerPoolsTest, UnreadDescriptorsAreBounded) {
  SessionLimits limits = ShortPatience();
  limits.unread_descriptors_max = 64;
  Start();
  listener_.reset();
  listener_ =
      FdListener::Start({.path = path_, .limits = limits, .epoch = 42, .pools = pools_.get()},
                        sessions_, store_, metrics_)
          .value();
  const UniqueFd greedy = Connect();
  ASSERT_EQ(Greet(greedy.get()).error(), "");
  const v1::PoolResponse joined = Call(greedy.get(), JoinRequest());
  ASSERT_EQ(joined.code(), 0u) << joined.error();
  v1::PoolRequest offer;
  offer.mutable_offer()->set_pool(joined.pool());
  const UniqueFd handle = CreateRoster().value();  // any memory file
  const int fds[] = {handle.get()};
  for (int i = 0; i < 20; ++i) ASSERT_EQ(Call(greedy.get(), offer, fds).code(), 0u);
  // Each response to a Join has 21 descriptors. The user may have 32 unread.
  std::vector<UniqueFd> sockets;
  const auto rejected = [&] {
    return metrics_.rejected[static_cast<size_t>(Rejection::kUnreadDescriptors)].value();
  };
  for (int i = 0; i < 2; ++i) {
    sockets.push_back(Connect());
    ASSERT_EQ(Greet(sockets.back().get()).error(), "");
    ASSERT_TRUE(SendFdMessage(sockets.back().get(), JoinRequest().SerializeAsString(), {}).ok());
  }
  EXPECT_TRUE(Eventually([&] { return rejected() == 1; }))
      << "the second response is not sent whole";
  EXPECT_LT(ReadDescriptors(sockets[1].get(), 21), 21u);
  EXPECT_EQ(ReadDescriptors(sockets[0].get(), 21), 21u) << "the first one is whole";
  // Now there is room.
  sockets.push_back(Connect());
  EXPECT_EQ(Greet(sockets.back().get()).error(), "");
  EXPECT_EQ(Call(sockets.back().get(), JoinRequest()).code(), 0u);
}

TEST_F(FdListenerPoolsTest, ALeaseOnAnOfferedRosterHoldsUpNoSession) {
  ASSERT_NE(::signal(SIGIO, SIG_IGN), SIG_ERR);  // the kernel notifies the holder with it
  Start();
  UniqueFd leased;
  {
    const UniqueFd roster = CreateRoster().value();
    leased = UniqueFd(
        ::open(("/proc/self/fd/" + std::to_string(roster.get())).c_str(), O_RDONLY | O_CLOEXEC));
  }
  ASSERT_EQ(::fcntl(leased.get(), F_SETLEASE, F_RDLCK), 0);
  const UniqueFd hostile = Connect();
  ASSERT_EQ(Greet(hostile.get()).error(), "");
  v1::PoolRequest join = JoinRequest();
  join.mutable_join()->set_pool(std::string(16, 'p'));
  const int fds[] = {leased.get()};
  ASSERT_TRUE(SendFdMessage(hostile.get(), join.SerializeAsString(), fds).ok());
  const TimePoint begin = Clock::Real().Now();
  for (int i = 0; i < 20; ++i) {
    const UniqueFd honest = Connect();
    EXPECT_EQ(Greet(honest.get()).error(), "");
  }
  EXPECT_LT(SecondsBetween(begin, Clock::Real().Now()), 20);
  const auto message = ReceiveFdMessage(hostile.get());
  v1::PoolResponse response;
  ASSERT_TRUE(message.ok() && response.ParseFromString(message->bytes));
  EXPECT_EQ(response.code(), static_cast<uint32_t>(absl::StatusCode::kUnavailable));
}

// A session's two sockets have something to say in one round, and the first one ends both.
TEST_F(FdListenerPoolsTest, BothSocketsOfASessionEndAtOnce) {
  Start();
  listener_.reset();
  FdListener::Options options = {.path = path_, .limits = ShortPatience(), .pools = pools_.get()};
  options.tenants.own_slabs = true;
  listener_ = FdListener::Start(options, sessions_, store_, metrics_).value();
  v1::SessionHello hello = Hello(0);
  hello.set_slab_grants(true);
  hello.set_pool_socket(true);
  const UniqueFd pidfd = PidfdOf(::getpid());
  const int fds[] = {pidfd.get()};
  for (int round = 0; round < 200; ++round) {
    const UniqueFd socket = Connect();
    std::vector<UniqueFd> received;
    const v1::SessionWelcome welcome =
        Greet(socket.get(), hello.SerializeAsString(), fds, &received);
    ASSERT_TRUE(welcome.pool_socket()) << welcome.error();
    ASSERT_EQ(received.size(), 1u);
    for (const int each : {received[0].get(), socket.get()}) ::shutdown(each, SHUT_RDWR);
  }
  EXPECT_TRUE(Eventually([&] { return sessions_.totals().sessions == 0; }));
  const UniqueFd honest = Connect();
  EXPECT_EQ(Greet(honest.get(), hello).error(), "");
}

// One request at a time: a process that sends more before it has read the responses has its
// connection ended, and takes no memory.
TEST_F(FdListenerPoolsTest, RequestsThatDoNotWaitForResponsesEndTheConnection) {
  Start();
  const UniqueFd hostile = Connect();
  ASSERT_EQ(Greet(hostile.get()).error(), "");
  const std::string join = JoinRequest().SerializeAsString();
  EXPECT_TRUE(Eventually([&] { return !SendFdMessage(hostile.get(), join, {}).ok(); }));
  EXPECT_TRUE(Eventually([&] { return sessions_.totals().sessions == 0; }));
  const UniqueFd honest = Connect();
  ASSERT_EQ(Greet(honest.get()).error(), "");
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Call(honest.get(), JoinRequest()).code(), 0u);
}

}  // namespace
}  // namespace crumb::server
