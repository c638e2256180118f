// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/fd_channel.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "common/errno_status.h"
#include "common/status_macros.h"

namespace crumb {
namespace {

// How long a process that is to listen at a path waits for another one there: a full backlog shows
// that there is one.
constexpr Duration kOtherListenerTimeout = std::chrono::milliseconds(200);

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("socket path '" + path + "' is empty or longer than " +
                                      std::to_string(sizeof(address.sun_path) - 1) + " bytes");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::StatusOr<UniqueFd> NewSocket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  return fd;
}

constexpr int64_t kNoTimeout = 0;

absl::Status SetTimeouts(int socket, int64_t us) {
  const timeval value{.tv_sec = us / 1'000'000, .tv_usec = us % 1'000'000};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    if (::setsockopt(socket, SOL_SOCKET, option, &value, sizeof(value)) != 0) {
      return ErrnoStatus(errno, "setting a socket's timeout");
    }
  }
  return absl::OkStatus();
}

const sockaddr* Generic(const sockaddr_un& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

// Room for all descriptors of a message: those that did not fit would be closed by the kernel while
// the message is received.
using ReceiveControl = std::array<char, CMSG_SPACE(kKernelFdsPerMessageMax * sizeof(int))>;

// Moves the descriptors out of a received message, so that none leaks whatever else is wrong.
void TakeFds(msghdr& message, std::vector<UniqueFd>* fds) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
}

}  // namespace

absl::StatusOr<UniqueFd> ListenFdChannel(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  const absl::Status other = ConnectFdChannel(path, kOtherListenerTimeout).status();
  if (other.ok() || absl::IsDeadlineExceeded(other)) {
    return absl::AlreadyExistsError("another process listens at " + path);
  }
  struct stat found;
  if (::lstat(path.c_str(), &found) == 0) {
    if (!S_ISSOCK(found.st_mode)) {
      return absl::FailedPreconditionError(path + " exists and is not a socket");
    }
    ::unlink(path.c_str());
  }
  CRUMB_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  if (::bind(fd.get(), Generic(address), sizeof(address)) != 0) {
    return ErrnoStatus(errno, "binding socket " + path);
  }
  if (::chmod(path.c_str(), 0660) != 0) return ErrnoStatus(errno, "setting the mode of " + path);
  if (::listen(fd.get(), 128) != 0) return ErrnoStatus(errno, "listening at " + path);
  return fd;
}

absl::Status SetSocketTimeout(int socket, Duration timeout) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(timeout).count();
  return SetTimeouts(socket, std::max<int64_t>(1, us));
}

// A Unix socket that does not block cannot be polled until its peer's backlog has room: connect()
// fails at once with EAGAIN, and no event follows. With SO_SNDTIMEO the kernel waits for room until
// that time.
absl::StatusOr<UniqueFd> ConnectFdChannel(const std::string& path, Duration timeout) {
  CRUMB_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  CRUMB_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  const TimePoint deadline = Clock::Real().Now() + timeout;
  int error = EINTR;
  while (error == EINTR && Clock::Real().Now() < deadline) {
    CRUMB_RETURN_IF_ERROR(SetSocketTimeout(fd.get(), deadline - Clock::Real().Now()));
    error = ::connect(fd.get(), Generic(address), sizeof(address)) == 0 ? 0 : errno;
  }
  if (error == EAGAIN || error == EINTR) {
    return absl::DeadlineExceededError("the process that listens at " + path +
                                       " accepts no connection");
  }
  if (error != 0) return ErrnoStatus(error, "connecting to " + path);
  CRUMB_RETURN_IF_ERROR(SetTimeouts(fd.get(), kNoTimeout));
  return fd;
}

absl::StatusOr<PeerCredentials> CredentialsOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return ErrnoStatus(errno, "reading the peer's credentials");
  }
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

absl::Status SendFdMessage(int socket, const std::string& bytes, std::span<const int> fds) {
  if (fds.size() > kFdsPerMessageMax || bytes.size() > kFdMessageBytesMax || bytes.empty()) {
    return absl::InvalidArgumentError("descriptor message out of bounds");
  }
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kFdsPerMessageMax * sizeof(int))> control{};
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "sending descriptors");
  }
  return absl::OkStatus();
}

// Looks at the message first, which opens its descriptors a second time, and takes it out of the
// socket then: the kernel lets go of the first copies, which are not the last ones.
absl::Status ReceiveFdMessage(int socket, FdMessage* received) {
  received->bytes.resize(kFdMessageBytesMax);
  received->fds.clear();
  iovec part{received->bytes.data(), received->bytes.size()};
  alignas(cmsghdr) ReceiveControl control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size;
  while ((size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_PEEK)) < 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "receiving descriptors");
  }
  TakeFds(message, &received->fds);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {  // some have no number in this process
    return absl::ResourceExhaustedError("no file descriptor is left for what was sent");
  }
  if (size == 0 && received->fds.empty()) return absl::UnavailableError("closed by the peer");
  char none;
  while (::recv(socket, &none, 0, MSG_DONTWAIT) < 0) {
    if (errno != EINTR) return ErrnoStatus(errno, "receiving descriptors");
  }
  if ((message.msg_flags & MSG_TRUNC) != 0 || received->fds.size() > kFdsPerMessageMax) {
    return absl::InvalidArgumentError("message larger than the protocol allows");
  }
  received->bytes.resize(static_cast<size_t>(size));
  return absl::OkStatus();
}

absl::StatusOr<size_t> ReceiveBytes(int socket, std::span<char> buffer,
                                    std::vector<UniqueFd>* fds) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) ReceiveControl control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
    return absl::UnavailableError("there is no message");
  }
  if (size < 0) {
    return absl::InternalError(std::string(ErrnoStatus(errno, "receiving a message").message()));
  }
  TakeFds(message, fds);
  return static_cast<size_t>(size);
}

absl::StatusOr<FdMessage> ReceiveFdMessage(int socket) {
  FdMessage received;
  CRUMB_RETURN_IF_ERROR(ReceiveFdMessage(socket, &received));
  return received;
}

}  // namespace crumb
