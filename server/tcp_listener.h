// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"
#include "server/options.h"

namespace crumb::server {

// Whether the wildcard address of one family stands for both families, where the kernel has both.
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
