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
#include "fmt/format.h"
#include "server/calls/lease_calls.h"

namespace crumb::server {
namespace {

constexpr uint64_t kWake = 0;
// Time that is left for sending the response over a local socket.
constexpr Duration kResponseMargin = std::chrono::milliseconds(1);
// Longer ones would overflow a sum, and mean for ever.
constexpr uint64_t kTimeoutMaxUs = uint64_t{24} * 3600 * 1'000'000;
constexpr int kBufferBytes = 2 * kCallMessageBytesMax;

TimePoint DeadlineIn(uint64_t timeout_us, TimePoint now) {
  if (timeout_us > kTimeoutMaxUs) return TimePoint::max();
  return now + std::chrono::microseconds(timeout_us) - kResponseMargin;
}

// The kind of call, as metrics count it, and the number of its response; 0: the message is no call.
struct CallName {
  Rpc rpc = Rpc::kAcquire;
  uint64_t number = 0;
};

CallName NameOf(const v1::SocketCall& call) {
  switch (call.call_case()) {
    case v1::SocketCall::kAcquire:
      return {Rpc::kAcquire, call.acquire().request()};
    case v1::SocketCall::kReserve:
      return {Rpc::kReserve, call.request()};
    case v1::SocketCall::kCommit:
      return {Rpc::kCommit, call.request()};
    case v1::SocketCall::CALL_NOT_SET:
      break;
  }
  return {};
}

// Keeps the thread that reads all sockets from being held up by one call.
absl::Status CheckSize(uint64_t fragments, uint64_t key_bytes, const std::string& pool) {
  if (!pool.empty()) {
    return absl::InvalidArgumentError("pool: calls about device pools go over gRPC");
  }
  if (fragments <= kCallFragmentsMax && key_bytes <= kCallFragmentsMax * sizeof(PageKey)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      fmt::format("a call of {} fragments and {} bytes of keys goes over gRPC: a call socket takes "
                  "{} of each at most",
                  fragments, key_bytes, kCallFragmentsMax));
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
  const std::string owner;  // the key in `closing`
};

// A call in progress.
struct CallSockets::Call {
  std::shared_ptr<Socket> socket;
  v1::SocketCall request;
  v1::SocketResponse response;
  std::unique_ptr<CallScope> scope;
};

absl::StatusOr<std::unique_ptr<CallSockets>> CallSockets::Start(const CallContext& context,
                                                                Options options) {
  std::unique_ptr<CallSockets> started(new CallSockets(context, std::move(options)));
  CRUMB_RETURN_IF_ERROR(started->OpenEpoll());
  started->thread_ = Thread(started->options_.thread, [plane = started.get()] { plane->Run(); });
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
    // The kernel may grant less. A message that does not fit is refused, and its caller uses gRPC.
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
    const CommitHere here =
        options_.copies && count == 1 ? CommitHere::kIfSmall : CommitHere::kNever;
    for (int i = 0; i < std::max(count, 0); ++i) {
      const uint64_t number = events[static_cast<size_t>(i)].data.u64;
      const std::shared_ptr<Socket> socket = Find(number);
      if (socket == nullptr) continue;  // closed meanwhile, or kWake
      std::vector<UniqueFd> fds;
      const absl::StatusOr<size_t> size = ReceiveBytes(socket->fd.get(), std::span(buffer), &fds);
      if (absl::IsUnavailable(size.status())) continue;
      const bool sound = size.ok() && *size > 0 && *size <= buffer.size() && fds.empty();
      if (!fds.empty()) {
        const size_t received = fds.size();
        socket->closing->Destroy(
            socket->owner, std::make_shared<const std::vector<UniqueFd>>(std::move(fds)), received);
      }
      if (!sound || !Serve(socket, here, std::span(buffer).first(*size))) Close(number);
    }
  }
}

std::shared_ptr<CallSockets::Socket> CallSockets::Find(uint64_t number) const {
  MutexLock lock(&mutex_);
  const auto found = sockets_.find(number);
  return found == sockets_.end() ? nullptr : found->second;
}

bool CallSockets::Serve(const std::shared_ptr<Socket>& socket, CommitHere here,
                        std::span<const char> message) {
  const auto call = std::make_shared<Call>();
  if (!call->request.ParseFromArray(message.data(), static_cast<int>(message.size()))) {
    return false;
  }
  const CallName name = NameOf(call->request);
  if (name.number == 0) return false;
  const std::shared_ptr<Session>& session = socket->session;
  call->socket = socket;
  call->scope = std::make_unique<CallScope>(context_, calls_, name.rpc);
  call->response.set_request(name.number);
  {
    MutexLock lock(&mutex_);
    ++open_calls_;
  }
  const absl::Status admitted =
      call->scope->Admit(session->engine().tenant(), CountedMemory(call->request, message.size()));
  const Done done = [this, call](const absl::Status& status) { End(*call, status); };
  if (!admitted.ok()) {
    done(admitted);
  } else if (call->request.has_acquire()) {
    server::Acquire(context_, session, DeadlineIn(call->request.timeout_us(), context_.clock.Now()),
                    call->request.acquire(), call->response.mutable_acquire(), done);
  } else if (call->request.has_reserve()) {
    const v1::ReserveRequest& request = call->request.reserve();
    const absl::Status fits = CheckSize(request.count(), request.keys().size(), request.pool());
    done(fits.ok() ? Reserve(context_, *session, request, call->response.mutable_reserve()) : fits);
  } else {
    const v1::CommitRequest& request = call->request.commit();
    const absl::Status fits =
        CheckSize(static_cast<uint64_t>(request.offsets_size()), 0, request.pool());
    if (!fits.ok()) {
      done(fits);
    } else {
      server::Commit(context_, *session, request, call->response.mutable_commit(), done, here);
    }
  }
  return true;
}

void CallSockets::End(Call& call, const absl::Status& status) {
  if (!status.ok()) {
    call.response.clear_acquire();
    call.response.clear_reserve();
    call.response.clear_commit();
    call.response.set_code(static_cast<uint32_t>(status.code()));
    call.response.set_error(std::string(status.message()));
  }
  call.scope->SetCode(status.code());
  call.scope.reset();
  if (call.response.has_acquire() && call.response.ByteSizeLong() > options_.response_bytes_max) {
    call.response.mutable_acquire()->clear_fragments();
    call.response.mutable_acquire()->clear_device_fragments();
    call.response.set_fragments_apart(true);
  }
  const std::string bytes = call.response.SerializeAsString();
  const int fd = call.socket->fd.get();
  if (::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    // The process has ended, or does not read its responses.
    Withdraw(call);
    ::shutdown(fd, SHUT_RDWR);
  }
  MutexLock lock(&mutex_);
  if (--open_calls_ == 0) idle_.NotifyAll();
}

void CallSockets::Withdraw(Call& call) {
  Session& session = *call.socket->session;
  if (call.request.has_acquire()) {
    context_.sessions.Release(session, session.acquires().Abandon(call.response.request()));
  }
  WithdrawReserve(session, call.request.reserve().request(), call.response.reserve());
}

}  // namespace crumb::server
