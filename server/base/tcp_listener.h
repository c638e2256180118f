// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace crumb::server {

// A place to listen at, or to connect to.
struct HostPort {
  std::string host;  // host name or address without brackets
  int port = 0;
};
// Reads "HOST:PORT" with a port from 0 to 65535; the host may be [IPv6]. kInvalidArgument naming
// `key`, the setting that has the text. Resolves no name.
absl::StatusOr<HostPort> ParseHostPort(const std::string& key, const std::string& text);

// Whether the wildcard address of one family (0.0.0.0 or [::]) stands for both families, where the
// kernel has both.
enum class WildcardListens { kItsFamily, kBothFamilies };

// Listens at every address of `place`. The sockets do not block. With port 0 the kernel chooses a
// port, which `place` has afterwards. `key` is the setting that errors name. kAlreadyExists: the
// port is in use; kInvalidArgument: the host has no address.
absl::StatusOr<std::vector<UniqueFd>> ListenTcp(const std::string& key, HostPort& place,
                                                WildcardListens wildcard);

// Accepts one connection; the descriptor does not block. Returns an invalid one, with errno, when
// there is none.
UniqueFd AcceptConnection(int listener);

}  // namespace crumb::server
