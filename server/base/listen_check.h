// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/base/tcp_listener.h"

// Whether crumbd could listen somewhere, found out before a library tries and says less.
namespace crumb::server {

// kNotFound: the folder is missing; kFailedPrecondition: it is not writable, or the path is no
// socket; kAlreadyExists: a process listens at it.
absl::Status CheckUnixSocketFree(const std::string& path);

// kAlreadyExists: the port is in use; kInvalidArgument: the host is no address of this machine.
// `key` is the setting to name.
absl::Status CheckTcpFree(const std::string& key, const HostPort& address);

}  // namespace crumb::server
