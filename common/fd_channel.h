// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/unique_fd.h"

// Messages with descriptors over a SOCK_SEQPACKET Unix socket: how a process and crumbd exchange
// memory. Blocking unless the socket is not.
namespace crumb {

inline constexpr size_t kFdMessageBytesMax = 64 << 10;
inline constexpr size_t kFdsPerMessageMax = 200;
// The most descriptors that the kernel passes in one message (SCM_MAX_FD). A sender that ignores
// the protocol can send as many.
inline constexpr size_t kKernelFdsPerMessageMax = 253;

struct FdMessage {
  std::string bytes;
  std::vector<UniqueFd> fds;
};

struct PeerCredentials {
  int pid = 0;  // 0: the peer lives in another PID namespace
  unsigned uid = 0;
  unsigned gid = 0;
};

// Listens at `path` (mode 0660), replacing a socket file at which no process listens.
// kAlreadyExists: a process does, even if it accepts no connection now; kNotFound: the folder is
// missing; kInvalidArgument: the path is too long.
absl::StatusOr<UniqueFd> ListenFdChannel(const std::string& path);

// How long ConnectFdChannel waits unless its caller says otherwise.
inline constexpr Duration kFdConnectTimeout = std::chrono::seconds(5);

// Connects to the listener at `path`. A listener whose backlog is full makes connect() wait; after
// `timeout` this gives up. kDeadlineExceeded: the listener accepted nothing in that time; other
// codes: no process listens there.
absl::StatusOr<UniqueFd> ConnectFdChannel(const std::string& path,
                                          Duration timeout = kFdConnectTimeout);

// Bounds each later send and each receive on a socket, and a connect.
absl::Status SetSocketTimeout(int socket, Duration timeout);

absl::StatusOr<PeerCredentials> CredentialsOf(int socket);

// `fds` are not closed; at most kFdsPerMessageMax.
absl::Status SendFdMessage(int socket, const std::string& bytes, std::span<const int> fds);

// Receives one message. kUnavailable "closed by the peer" at the end; kInvalidArgument for a
// message that is larger than the protocol allows; kResourceExhausted when this process may not
// open as many descriptors as were sent: the message stays in the socket.
absl::StatusOr<FdMessage> ReceiveFdMessage(int socket);
// Receives one message into `message`, whose `fds` own all opened descriptors even after an error.
// The last close of another process's descriptor may block for as long as that process likes. This
// function closes none: the caller chooses the thread that destroys `message`, and the one that
// closes the socket, which closes the descriptors in messages that were not received.
// REQUIRES: no other thread receives from the socket.
absl::Status ReceiveFdMessage(int socket, FdMessage* message);

// Receives one message into `buffer` without waiting, from a socket whose protocol has no
// descriptors, with one system call. Returns its size, which is more than the buffer's if it did
// not fit, and 0 at the end; kUnavailable: there is none; kInternal: the socket is broken.
// Descriptors that came along are added to `fds`, for the same reason; those for which this process
// has no number are closed here.
absl::StatusOr<size_t> ReceiveBytes(int socket, std::span<char> buffer, std::vector<UniqueFd>* fds);

}  // namespace crumb
