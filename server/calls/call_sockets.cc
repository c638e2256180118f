// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/call_sockets.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "common/errno_status.h"
#include "common/fd_channel.h"
#include "common/status_macros.h"
#include "server/calls/lease_calls.h"

namespace crumb::server {
namespace {

constexpr uint64_t kWake = 0;
// The way back over a local socket.
constexpr Duration kAnswerMargin = std::chrono::milliseconds(1);
// Longer ones would overflow a sum, and mean for ever.
constexpr uint64_t kTimeoutMaxUs = uint64_t{24} * 3600 * 1'000'000;
constexpr int kBufferBytes = 2 * kCallMessageBytesMax;

TimePoint DeadlineIn(uint64_t timeout_us, TimePoint now) {
  if (timeout_us > kTimeoutMaxUs) return TimePoint::max();
  return now + std::chrono::microseconds(timeout_us) - kAnswerMargin;
}

}  // namespace

// crumbd's end of a session's socket. Messages that were not received may hold descriptors whose
// close blocks, and the last reference may go on any thread: so a task closes the socket.
struct CallSockets::Socket {
  Socket(UniqueFd end, std::shared_ptr<Session> user, std::shared_ptr<OwnerTasks> tasks,
         std::string name)
      : fd(std::move(end)),
        session(std::move(user)),
        closing(std::move(tasks)),
        owner(std::move(name)) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() { closing->Destroy(owner, std::make_shared<UniqueFd>(std::move(fd))); }

  UniqueFd fd;
  const std::shared_ptr<Session> session;
  const std::shared_ptr<OwnerTasks> closing;
  const std::string owner;  // in `closing`
};

// A question until it is answered.
struct CallSockets::Call {
  std::shared_ptr<Socket> socket;
  v1::SocketCall question;
  v1::SocketAnswer answer;
  std::unique_ptr<CallScope> scope;
};

absl::StatusOr<std::unique_ptr<CallSockets>> CallSockets::Start(const CallContext& context,
                                                                size_t answer_bytes_max) {
  std::unique_ptr<CallSockets> started(new CallSockets(context, answer_bytes_max));
  CRUMB_RETURN_IF_ERROR(started->OpenEpoll());
  started->thread_ = Thread("crumb-calls", [plane = started.get()] { plane->Run(); });
  return started;
}

absl::Status CallSockets::OpenEpoll() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return ErrnoStatus(errno, "epoll_create1");
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) return ErrnoStatus(errno, "eventfd");
  return Watch(wake_.get(), kWake);
}

void CallSockets::Stop() {
  stopping_.store(true);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  thread_.Join();
  std::unordered_map<uint64_t, std::shared_ptr<Socket>> closed;
  MutexLock lock(&mutex_);
  for (const auto& [number, socket] : sockets_) ::shutdown(socket->fd.get(), SHUT_RD);
  while (open_calls_ > 0) idle_.Wait(&mutex_);
  for (const auto& [number, socket] : sockets_) ::shutdown(socket->fd.get(), SHUT_RDWR);
  closed.swap(sockets_);  // destroyed behind the lock
}

absl::Status CallSockets::Watch(int fd, uint64_t number) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = number;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  return absl::OkStatus();
}

absl::StatusOr<CallPlane::Opened> CallSockets::Open(std::shared_ptr<Session> session,
                                                    std::shared_ptr<OwnerTasks> closing,
                                                    std::string owner) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus(errno, "a socket for calls");
  }
  const auto socket = std::make_shared<Socket>(UniqueFd(ends[0]), std::move(session),
                                               std::move(closing), std::move(owner));
  Opened opened;
  opened.socket = UniqueFd(ends[1]);
  for (const int end : ends) {
    // As much as the host allows; what does not fit is refused and asked for over gRPC.
    ::setsockopt(end, SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof(kBufferBytes));
  }
  MutexLock lock(&mutex_);
  if (stopping_.load()) return absl::UnavailableError("crumbd is stopping");
  opened.number = ++last_number_;
  CRUMB_RETURN_IF_ERROR(Watch(socket->fd.get(), opened.number));
  sockets_[opened.number] = socket;
  return opened;
}

void CallSockets::Close(uint64_t number) {
  std::shared_ptr<Socket> socket;
  {
    MutexLock lock(&mutex_);
    const auto found = sockets_.find(number);
    if (found == sockets_.end()) return;
    socket = std::move(found->second);
    sockets_.erase(found);
  }
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket->fd.get(), nullptr);
  ::shutdown(socket->fd.get(), SHUT_RDWR);
}

void CallSockets::Run() {
  std::vector<char> buffer(kCallMessageBytesMax);
  std::array<epoll_event, 16> events;
  while (!stopping_.load()) {
    const int count =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < std::max(count, 0); ++i) {
      const uint64_t number = events[static_cast<size_t>(i)].data.u64;
      if (number != kWake) OnReadable(number, buffer);
    }
  }
}

void CallSockets::OnReadable(uint64_t number, std::span<char> buffer) {
  std::shared_ptr<Socket> socket;
  {
    MutexLock lock(&mutex_);
    const auto found = sockets_.find(number);
    if (found == sockets_.end()) return;  // closed meanwhile
    socket = found->second;
  }
  std::vector<UniqueFd> fds;
  const absl::StatusOr<size_t> size = ReceiveBytes(socket->fd.get(), buffer, &fds);
  if (absl::IsUnavailable(size.status())) return;
  bool served = size.ok() && *size > 0 && *size <= buffer.size() && fds.empty();
  if (!fds.empty()) {
    const size_t count = fds.size();
    socket->closing->Destroy(socket->owner,
                             std::make_shared<const std::vector<UniqueFd>>(std::move(fds)), count);
  }
  served = served && Begin(socket, buffer.first(*size));
  if (!served) Close(number);
}

bool CallSockets::Begin(const std::shared_ptr<Socket>& socket, std::span<const char> message) {
  const auto call = std::make_shared<Call>();
  if (!call->question.ParseFromArray(message.data(), static_cast<int>(message.size())) ||
      call->question.acquire().request() == 0) {
    return false;
  }
  call->socket = socket;
  call->scope = std::make_unique<CallScope>(context_, calls_, Rpc::kAcquire);
  call->answer.set_request(call->question.acquire().request());
  {
    MutexLock lock(&mutex_);
    ++open_calls_;
  }
  const absl::Status admitted = call->scope->Admit(socket->session->engine().tenant());
  if (!admitted.ok()) {
    End(*call, admitted);
    return true;
  }
  server::Acquire(context_, socket->session,
                  DeadlineIn(call->question.timeout_us(), context_.clock.Now()),
                  call->question.acquire(), call->answer.mutable_acquire(),
                  [this, call](const absl::Status& status) { End(*call, status); });
  return true;
}

void CallSockets::End(Call& call, const absl::Status& status) {
  if (!status.ok()) {
    call.answer.clear_acquire();
    call.answer.set_code(static_cast<uint32_t>(status.code()));
    call.answer.set_error(std::string(status.message()));
  }
  call.scope->SetCode(status.code());
  call.scope.reset();
  Answer(call);
  MutexLock lock(&mutex_);
  if (--open_calls_ == 0) idle_.NotifyAll();
}

void CallSockets::Answer(Call& call) {
  if (call.answer.ByteSizeLong() > answer_bytes_max_) {
    call.answer.mutable_acquire()->clear_fragments();
    call.answer.mutable_acquire()->clear_device_fragments();
    call.answer.set_fragments_apart(true);
  }
  const std::string bytes = call.answer.SerializeAsString();
  const int fd = call.socket->fd.get();
  if (::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return;
  // The process has ended, or does not read its responses: it will not release the lease.
  Session& session = *call.socket->session;
  context_.sessions.Release(session, session.acquires().Abandon(call.answer.request()));
  ::shutdown(fd, SHUT_RDWR);
}

}  // namespace crumb::server
