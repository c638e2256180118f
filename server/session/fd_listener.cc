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
#include <utility>
#include <vector>

#include "common/errno_status.h"
#include "common/limited_log.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "server/session/epoll_fd_listener.h"

namespace crumb::server {
namespace {

absl::Status SetNonBlocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return ErrnoStatus(errno, "making a socket non-blocking");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FdListener>> FdListener::Start(const Options& options,
                                                              SessionTable& sessions,
                                                              storage::TieredStore& store,
                                                              ServerMetrics& metrics) {
  auto listener = std::make_unique<EpollFdListener>(options, sessions, store, metrics);
  CRUMB_RETURN_IF_ERROR(listener->Open());
  return listener;
}

EpollFdListener::EpollFdListener(const Options& options, SessionTable& sessions,
                                 storage::TieredStore& store, ServerMetrics& metrics)
    : options_(options),
      sessions_(sessions),
      store_(store),
      metrics_(metrics),
      handshakes_(static_cast<size_t>(options.limits.handshakes_max),
                  std::min(options.limits.hello_grace, options.limits.hello_timeout),
                  options.limits.hello_timeout),
      tasks_(std::make_shared<OwnerTasks>(OwnerTasks::Options{.name = "crumb-descriptors"})),
      unread_(std::make_shared<UnreadDescriptors>(
          static_cast<uint64_t>(options.limits.unread_descriptors_max),
          [tasks = std::weak_ptr<OwnerTasks>(tasks_)](const std::string& owner, SharedFd socket) {
            if (const auto alive = tasks.lock()) alive->Destroy(owner, std::move(socket));
          })),
      pools_(options.pools, tasks_, unread_, metrics) {}

EpollFdListener::~EpollFdListener() {
  if (listener_.valid()) ::unlink(options_.path.c_str());
  stopping_.store(true);
  Wake();
  thread_.Join();
  for (auto& [number, connection] : connections_) {
    CloseSlabs(connection);
    Forget(connection, &connection.socket);
    Forget(connection, &connection.pools);
  }
  unread_->Clear();
  sessions_.OnEnded([] {});
}

absl::Status EpollFdListener::Open() {
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

absl::Status EpollFdListener::Add(int fd, uint64_t word) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = word;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  return absl::OkStatus();
}

void EpollFdListener::Wake() {
  const uint64_t one = 1;
  // A full counter wakes as well.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void EpollFdListener::Run() {
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

int EpollFdListener::WaitMs() const {
  TimePoint next = handshakes_.NextLate();
  if (accept_paused_) next = std::min(next, accept_again_);
  next = std::min(next, pools_next_);
  if (next == TimePoint::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::Real().Now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

void EpollFdListener::Handle(uint64_t word) {
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

std::string EpollFdListener::OwnerOfConnection(const Connection& connection) const {
  return OwnerOf(connection.session == nullptr ? "" : connection.session->engine().tenant(),
                 connection.user);
}

absl::Status EpollFdListener::Receive(const Connection& connection, const SharedFd& socket,
                                      FdMessage* message) {
  if (Blocks(OwnerOfConnection(connection))) {
    return absl::ResourceExhaustedError("sessions.closing_max: earlier descriptors do not close");
  }
  return ReceiveFdMessage(socket->get(), message);
}

void EpollFdListener::CloseReceived(const Connection& connection, FdMessage message) {
  if (message.fds.empty()) return;
  const size_t count = message.fds.size();
  tasks_->Destroy(OwnerOfConnection(connection),
                  std::make_shared<const std::vector<UniqueFd>>(std::move(message.fds)), count);
}

void EpollFdListener::OnSocket(uint64_t number, Connection& connection) {
  if (!HasMessage(connection.socket)) return;
  FdMessage message;
  const absl::Status received = Receive(connection, connection.socket, &message);
  if (connection.session == nullptr) {
    handshakes_.Remove(number);
    const bool opened = received.ok() && OpenSession(number, connection, message);
    CloseReceived(connection, std::move(message));
    if (opened) return;
    if (!received.ok() && !absl::IsUnavailable(received)) metrics_.hellos_refused.Add();
    return Close(number);
  }
  // After the hello a process has to talk about pools only: else this is the end.
  const bool here = connection.pools == nullptr;
  if (here && received.ok() && ServePools(connection, message)) return;
  CloseReceived(connection, std::move(message));
  CloseSlabs(connection);
  CloseCalls(connection);
  Forget(connection, &connection.socket);
  Forget(connection, &connection.pools);
  const std::shared_ptr<Session> session = connection.session;
  sessions_.Disconnect(session);  // its process stays watched
  if (session->phase() == Session::Phase::kEnded) Close(number);
}

void EpollFdListener::OnPools(Connection& connection) {
  if (!HasMessage(connection.pools)) return;
  FdMessage message;
  const absl::Status received = Receive(connection, connection.pools, &message);
  if (received.ok() && ServePools(connection, message)) return;
  CloseReceived(connection, std::move(message));
  Forget(connection, &connection.pools);
}

void EpollFdListener::Forget(const Connection& connection, SharedFd* fd) {
  if (*fd == nullptr) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, (*fd)->get(), nullptr);
  ::shutdown((*fd)->get(), SHUT_RDWR);
  tasks_->Destroy(OwnerOfConnection(connection), std::move(*fd));
}

bool EpollFdListener::HasPools(const Connection& connection) const {
  return pools_.enabled() && (connection.slabs == nullptr || connection.pools != nullptr);
}

absl::StatusOr<UniqueFd> EpollFdListener::OpenPools(uint64_t number, Connection& connection) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus(errno, "a socket for device pools");
  }
  UniqueFd other(ends[1]);
  connection.pools = std::make_shared<const UniqueFd>(ends[0]);
  CRUMB_RETURN_IF_ERROR(SetNonBlocking(connection.pools->get()));
  CRUMB_RETURN_IF_ERROR(Add(connection.pools->get(), WordOf(number, Source::kPools)));
  return other;
}

bool EpollFdListener::ServePools(const Connection& connection, FdMessage& message) {
  const SharedFd& socket = connection.pools == nullptr ? connection.socket : connection.pools;
  return HasPools(connection) && pools_.Serve(connection.session, connection.pools_busy, socket,
                                              OwnerOfConnection(connection), message);
}

absl::StatusOr<std::shared_ptr<Session>> EpollFdListener::OpenFor(
    const Connection& connection, const SessionTable::OpenRequest& request) {
  if (Blocks(OwnerOf(request.tenant, connection.user))) {
    return absl::ResourceExhaustedError(
        "sessions.closing_max: descriptors that the tenant's processes sent do not close");
  }
  return sessions_.Open(request);
}

bool EpollFdListener::OpenSession(uint64_t number, Connection& connection, FdMessage& message) {
  absl::StatusOr<Hello> hello =
      ReadHello(connection.socket->get(), message, options_.limits, options_.tenants);
  absl::StatusOr<std::shared_ptr<Session>> session =
      hello.ok() ? OpenFor(connection, hello->request) : hello.status();
  if (!session.ok()) {
    LogWarningLimited("session refused: {}", session.status().ToString());
    // Counted before the refusal, because the process may react to that at once.
    metrics_.hellos_refused.Add();
    RefuseHello(connection.socket->get(), session.status());
    return false;
  }
  connection.session = *session;
  connection.pidfd = std::move(hello->pidfd);
  const absl::Status sent = Welcome(number, connection, *hello);
  if (!sent.ok() || !Add(connection.pidfd.get(), WordOf(number, Source::kPidfd)).ok()) {
    LogWarningLimited("session of {} is not opened: {}", (*session)->process_name(),
                      sent.ToString());
    metrics_.hellos_refused.Add();
    sessions_.End(*session);
    return false;
  }
  LogInfoLimited("session of {} opened, staging {} bytes", (*session)->process_name(),
                 (*session)->staging() == nullptr ? 0 : (*session)->staging()->size());
  return true;
}

DescriptorSender EpollFdListener::SenderTo(const Connection& connection) {
  return [unread = unread_, owner = OwnerOfConnection(connection), socket = connection.socket,
          &metrics = metrics_](const std::string& bytes, std::span<const int> fds) {
    absl::Status sent = unread->Send(owner, socket, bytes, fds);
    if (absl::IsResourceExhausted(sent)) metrics.Reject(Rejection::kUnreadDescriptors);
    return sent;
  };
}

absl::Status EpollFdListener::Welcome(uint64_t number, Connection& connection, const Hello& hello) {
  std::vector<storage::Slab> slabs = store_.slabs();
  UniqueFd pools;  // the process's end
  if (options_.tenants.own_slabs) {
    connection.slabs = std::make_shared<SlabGate>(
        connection.socket->get(), slabs.empty() ? 0 : slabs[0].bytes, SenderTo(connection));
    connection.session->SetSlabs(connection.slabs);
    slabs.clear();
    if (hello.pool_socket && pools_.enabled()) {
      CRUMB_ASSIGN_OR_RETURN(pools, OpenPools(number, connection));
    }
  }
  CallPlane::Opened calls, staging_calls;
  if (hello.call_socket) {
    CRUMB_ASSIGN_OR_RETURN(calls, OpenCalls(options_.calls, connection));
    connection.calls = calls.number;
  }
  if (hello.staging_socket && connection.session->staging() != nullptr) {
    CRUMB_ASSIGN_OR_RETURN(staging_calls, OpenCalls(options_.staging_calls, connection));
    connection.staging_calls = staging_calls.number;
  }
  return SendWelcome(SenderTo(connection), *connection.session, slabs, options_.epoch,
                     static_cast<uint32_t>(options_.limits.lease_pages_max),
                     {HasPools(connection), pools.get()},
                     {calls.socket.get(), staging_calls.socket.get()});
}

absl::StatusOr<CallPlane::Opened> EpollFdListener::OpenCalls(CallPlane* plane,
                                                             const Connection& connection) {
  if (plane == nullptr) return CallPlane::Opened();
  return plane->Open(connection.session, tasks_, OwnerOfConnection(connection));
}

void EpollFdListener::OnProcessEnd(uint64_t number, Connection& connection) {
  sessions_.End(connection.session);
  Close(number);
}

void EpollFdListener::DropEnded() {
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

void EpollFdListener::CloseCalls(Connection& connection) const {
  if (connection.calls != 0) options_.calls->Close(std::exchange(connection.calls, 0));
  if (connection.staging_calls != 0) {
    options_.staging_calls->Close(std::exchange(connection.staging_calls, 0));
  }
}

void EpollFdListener::Close(uint64_t number) {
  handshakes_.Remove(number);
  const auto found = connections_.find(number);
  if (found == connections_.end()) return;
  CloseSlabs(found->second);
  CloseCalls(found->second);
  Forget(found->second, &found->second.socket);
  Forget(found->second, &found->second.pools);
  if (found->second.pidfd.valid()) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.pidfd.get(), nullptr);
  }
  connections_.erase(found);
}

}  // namespace crumb::server
