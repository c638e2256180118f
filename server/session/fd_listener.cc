// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/fd_listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/errno_status.h"
#include "common/fd_channel.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "common/thread.h"
#include "crumb/v1/session.pb.h"
#include "server/device/device_pools.h"
#include "server/session/hello.h"

namespace crumb::server {
namespace {

// Connections are numbered from 1; epoll's word is the number times 4, plus what it is about.
constexpr uint64_t kListenerWord = 0;
constexpr uint64_t kWakeWord = 1;
enum class Source : uint64_t { kSocket, kPidfd, kPools };
constexpr uint64_t WordOf(uint64_t number, Source source) {
  return number << 2 | static_cast<uint64_t>(source);
}

// A PoolAnswer that says of its first field, the code, that it is 0.
constexpr std::string_view kNoError("\x08\0", 2);

// How long accepting pauses when descriptors have run out.
constexpr auto kAcceptPause = std::chrono::milliseconds(200);

struct Connection {
  UniqueFd socket;     // none once the process closed it
  UniqueFd pidfd;      // none before the hello
  UniqueFd pools;      // talks about pools; none: `socket` does, or nobody
  uint64_t calls = 0;  // its socket for calls; 0: none
  TimePoint hello_deadline;
  std::shared_ptr<Session> session;  // null before the hello
  std::shared_ptr<SlabGate> slabs;   // null: the process has them all
};

class EpollFdListener : public FdListener {
 public:
  EpollFdListener(const Options& options, SessionTable& sessions, storage::TieredStore& store,
                  ServerMetrics& metrics)
      : options_(options), sessions_(sessions), store_(store), metrics_(metrics) {}

  ~EpollFdListener() override {
    if (listener_.valid()) ::unlink(options_.path.c_str());
    stopping_.store(true);
    Wake();
    thread_.Join();
    for (auto& [number, connection] : connections_) CloseSlabs(connection);
    sessions_.OnEnded([] {});
  }

  absl::Status Open() {
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_.valid()) return ErrnoStatus(errno, "epoll_create1");
    wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_.valid()) return ErrnoStatus(errno, "eventfd");
    CRUMB_ASSIGN_OR_RETURN(listener_, ListenFdChannel(options_.path));
    CRUMB_RETURN_IF_ERROR(SetNonBlocking(listener_.get()));
    CRUMB_RETURN_IF_ERROR(Add(listener_.get(), kListenerWord));
    CRUMB_RETURN_IF_ERROR(Add(wake_.get(), kWakeWord));
    sessions_.OnEnded([this] { Wake(); });
    thread_ = Thread("crumb-sessions", [this] { Run(); });
    return absl::OkStatus();
  }

 private:
  static absl::Status SetNonBlocking(int fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
      return ErrnoStatus(errno, "making a socket non-blocking");
    }
    return absl::OkStatus();
  }

  absl::Status Add(int fd, uint64_t word) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = word;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return ErrnoStatus(errno, "epoll_ctl");
    }
    return absl::OkStatus();
  }

  void Wake() {
    const uint64_t one = 1;
    // A full counter wakes as well.
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  }

  void Run() {
    std::array<epoll_event, 64> events;
    while (!stopping_.load()) {
      const int count =
          ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), WaitMs());
      for (int i = 0; i < std::max(count, 0); ++i) Handle(events[static_cast<size_t>(i)].data.u64);
      DropLateHellos();
      ResumeAccepting();
      if (options_.pools != nullptr) pools_next_ = options_.pools->Check();
    }
  }

  // Until the next deadline; for ever when there is none.
  int WaitMs() const {
    TimePoint next = TimePoint::max();
    if (!handshakes_.empty()) next = connections_.at(*handshakes_.begin()).hello_deadline;
    if (accept_paused_) next = std::min(next, accept_again_);
    next = std::min(next, pools_next_);
    if (next == TimePoint::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::Real().Now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
  }

  void Handle(uint64_t word) {
    if (word == kListenerWord) return Accept();
    if (word == kWakeWord) return DropEnded();
    const auto found = connections_.find(word >> 2);
    if (found == connections_.end()) return;  // closed by an earlier event of this round
    switch (static_cast<Source>(word & 3)) {
      case Source::kPidfd:
        return OnProcessEnd(found->first, found->second);
      case Source::kPools:
        return OnPools(found->second);
      case Source::kSocket:
        return OnSocket(found->first, found->second);
    }
  }

  void Accept() {
    while (true) {
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.valid()) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
          PauseAccepting();
        }
        return;
      }
      // The oldest silent one makes room: a process says hello right after connecting.
      if (handshakes_.size() >= static_cast<size_t>(options_.limits.handshakes_max)) {
        metrics_.hellos_refused.Add();
        Close(*handshakes_.begin());
      }
      const uint64_t number = ++last_number_;
      if (!Add(socket.get(), WordOf(number, Source::kSocket)).ok()) continue;
      Connection& connection = connections_[number];
      connection.socket = std::move(socket);
      connection.hello_deadline = Clock::Real().Now() + options_.limits.hello_timeout;
      handshakes_.insert(number);
    }
  }

  void PauseAccepting() {
    LogWarning("no more descriptors: new sessions wait");
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
    accept_paused_ = true;
    accept_again_ = Clock::Real().Now() + kAcceptPause;
  }

  void ResumeAccepting() {
    if (!accept_paused_ || Clock::Real().Now() < accept_again_) return;
    accept_paused_ = !Add(listener_.get(), kListenerWord).ok();
    accept_again_ = Clock::Real().Now() + kAcceptPause;
  }

  void DropLateHellos() {
    while (!handshakes_.empty()) {
      const uint64_t number = *handshakes_.begin();
      if (Clock::Real().Now() < connections_.at(number).hello_deadline) return;
      metrics_.hellos_refused.Add();
      Close(number);
    }
  }

  void OnSocket(uint64_t number, Connection& connection) {
    absl::StatusOr<FdMessage> message = ReceiveFdMessage(connection.socket.get());
    if (connection.session == nullptr) {
      handshakes_.erase(number);
      if (message.ok()) {
        if (OpenSession(number, connection, std::move(*message))) return;
      } else if (!absl::IsUnavailable(message.status())) {
        metrics_.hellos_refused.Add();
      }
      return Close(number);
    }
    // After the hello a process has to talk about pools only: else this is the end.
    const bool here = !connection.pools.valid();
    if (here && message.ok() && AnswerPools(connection, *std::move(message))) return;
    CloseSlabs(connection);
    CloseCalls(connection);
    Forget(&connection.socket);
    Forget(&connection.pools);
    const std::shared_ptr<Session> session = connection.session;
    sessions_.Disconnect(session);  // its process stays watched
    if (session->phase() == Session::Phase::kEnded) Close(number);
  }

  // A process that talks of something else there talks of pools no more.
  void OnPools(Connection& connection) {
    absl::StatusOr<FdMessage> message = ReceiveFdMessage(connection.pools.get());
    if (message.ok() && AnswerPools(connection, *std::move(message))) return;
    Forget(&connection.pools);
  }

  // Closing a descriptor takes it out of epoll only when nobody else holds it.
  void Forget(UniqueFd* fd) {
    if (!fd->valid()) return;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd->get(), nullptr);
    fd->Reset();
  }

  // Grants and answers would get between each other on one socket.
  bool HasPools(const Connection& connection) const {
    return options_.pools != nullptr && options_.pools->enabled() &&
           (connection.slabs == nullptr || connection.pools.valid());
  }

  // A pair of sockets about pools: this end is the connection's, the other one is returned.
  absl::StatusOr<UniqueFd> OpenPools(uint64_t number, Connection& connection) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
      return ErrnoStatus(errno, "a socket for device pools");
    }
    UniqueFd other(ends[1]);
    connection.pools = UniqueFd(ends[0]);
    CRUMB_RETURN_IF_ERROR(SetNonBlocking(connection.pools.get()));
    CRUMB_RETURN_IF_ERROR(Add(connection.pools.get(), WordOf(number, Source::kPools)));
    return other;
  }

  // False: it was not about pools, or the process does not read its answers.
  bool AnswerPools(const Connection& connection, FdMessage message) {
    v1::PoolRequest request;
    if (!HasPools(connection) || !request.ParseFromString(message.bytes)) return false;
    const PoolReply reply =
        options_.pools->Handle(connection.session, request, std::move(message.fds));
    std::vector<int> fds;
    for (const UniqueFd& fd : reply.fds) fds.push_back(fd.get());
    std::string bytes = reply.answer.SerializeAsString();
    // An answer without content; a message without content would be the end of the connection.
    if (bytes.empty()) bytes = kNoError;
    const UniqueFd& socket = connection.pools.valid() ? connection.pools : connection.socket;
    return SendFdBatches(socket.get(), std::move(bytes), fds).ok();
  }

  // False: refused and counted, and the connection is to be closed.
  bool OpenSession(uint64_t number, Connection& connection, FdMessage message) {
    absl::StatusOr<Hello> hello =
        ReadHello(connection.socket.get(), std::move(message), options_.limits, options_.tenants);
    absl::StatusOr<std::shared_ptr<Session>> session =
        hello.ok() ? sessions_.Open(hello->request) : hello.status();
    if (!session.ok()) {
      LogWarning("session refused: {}", session.status().ToString());
      metrics_.hellos_refused.Add();  // before the answer, which the process may act on
      RefuseHello(connection.socket.get(), session.status());
      return false;
    }
    connection.session = *session;
    connection.pidfd = std::move(hello->pidfd);
    const absl::Status answered = Welcome(number, connection, *hello);
    if (!answered.ok() || !Add(connection.pidfd.get(), WordOf(number, Source::kPidfd)).ok()) {
      LogWarning("session of {} is not opened: {}", (*session)->process_name(),
                 answered.ToString());
      metrics_.hellos_refused.Add();
      sessions_.End(*session);
      return false;
    }
    LogInfo("session of {} opened, staging {} bytes", (*session)->process_name(),
            (*session)->staging() == nullptr ? 0 : (*session)->staging()->size());
    return true;
  }

  absl::Status Welcome(uint64_t number, Connection& connection, const Hello& hello) {
    std::vector<storage::Slab> slabs = store_.slabs();
    UniqueFd pools;  // the process's end
    if (options_.tenants.own_slabs) {
      connection.slabs =
          std::make_shared<SlabGate>(connection.socket.get(), slabs.empty() ? 0 : slabs[0].bytes);
      connection.session->SetSlabs(connection.slabs);
      slabs.clear();
      if (hello.pool_socket && options_.pools != nullptr && options_.pools->enabled()) {
        CRUMB_ASSIGN_OR_RETURN(pools, OpenPools(number, connection));
      }
    }
    CallPlane::Opened calls;
    if (hello.call_socket && options_.calls != nullptr) {
      CRUMB_ASSIGN_OR_RETURN(calls, options_.calls->Open(connection.session));
      connection.calls = calls.number;
    }
    return AnswerHello(connection.socket.get(), *connection.session, slabs, options_.epoch,
                       static_cast<uint32_t>(options_.limits.lease_pages_max),
                       {HasPools(connection), pools.get()}, calls.socket.get());
  }

  void OnProcessEnd(uint64_t number, Connection& connection) {
    sessions_.End(connection.session);
    Close(number);
  }

  void DropEnded() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof(count));
    std::vector<uint64_t> ended;
    for (const auto& [number, connection] : connections_) {
      if (connection.session != nullptr && connection.session->phase() == Session::Phase::kEnded) {
        ended.push_back(number);
      }
    }
    for (const uint64_t number : ended) Close(number);
  }

  // The socket is about to be closed.
  static void CloseSlabs(Connection& connection) {
    if (connection.slabs != nullptr) connection.slabs->Close();
  }

  void CloseCalls(Connection& connection) const {
    if (connection.calls != 0) options_.calls->Close(std::exchange(connection.calls, 0));
  }

  void Close(uint64_t number) {
    handshakes_.erase(number);
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    CloseSlabs(found->second);
    CloseCalls(found->second);
    for (UniqueFd* fd : {&found->second.socket, &found->second.pidfd, &found->second.pools}) {
      Forget(fd);
    }
    connections_.erase(found);
  }

  const Options options_;
  SessionTable& sessions_;
  storage::TieredStore& store_;
  ServerMetrics& metrics_;
  UniqueFd epoll_;
  UniqueFd wake_;
  UniqueFd listener_;
  std::atomic<bool> stopping_{false};

  // The thread's own.
  uint64_t last_number_ = 0;
  std::unordered_map<uint64_t, Connection> connections_;
  std::set<uint64_t> handshakes_;  // numbers without hello, oldest first
  bool accept_paused_ = false;
  TimePoint accept_again_;
  TimePoint pools_next_ = TimePoint::max();  // when pools are to be looked at

  Thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FdListener>> FdListener::Start(const Options& options,
                                                              SessionTable& sessions,
                                                              storage::TieredStore& store,
                                                              ServerMetrics& metrics) {
  auto listener = std::make_unique<EpollFdListener>(options, sessions, store, metrics);
  CRUMB_RETURN_IF_ERROR(listener->Open());
  return listener;
}

}  // namespace crumb::server
