// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/base/tcp_listener.h"

// Whether crumbd could listen somewhere, found out before a library tries and says less.
namespace crumb::server {

// Checks that a Unix socket can be made at `path`, where a socket without a process may lie.
// kNotFound: the folder is missing; kFailedPrecondition: it is not writable, or the path is no
// socket; kAlreadyExists: a process listens at it; kInvalidArgument: the path is empty or too long
// for a socket's address. Another process may still take the path after the check.
absl::Status CheckUnixSocketFree(const std::string& path);

// Checks that every address of `address` can be listened at, by doing so for a moment.
// kAlreadyExists: the port is in use; kInvalidArgument: the host is no address of this machine.
// `key` is the setting to name.
absl::Status CheckTcpFree(const std::string& key, const HostPort& address);

}  // namespace crumb::server
