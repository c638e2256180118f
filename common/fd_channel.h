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
inline constexpr size_t kFdsPerMessageMax = 200;  // the kernel passes at most 253

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

// kUnavailable "closed by the peer" at the end; kInvalidArgument for a message that is too large;
// kResourceExhausted when this process may not open as many descriptors as were sent, of which
// those received so far are closed.
absl::StatusOr<FdMessage> ReceiveFdMessage(int socket);
// Likewise, into `message`, whose `fds` are all descriptors that came along, with an error too:
// closing a descriptor of another process may block, so the caller chooses the thread that does it.
absl::Status ReceiveFdMessage(int socket, FdMessage* message);

}  // namespace crumb
