// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"

namespace crumb::server {

// Checks that `fd` is a pidfd of a living process, and of process `pid` when that is not 0 and both
// live in a PID namespace that this process sees. kInvalidArgument otherwise.
absl::Status CheckPidfd(int fd, int pid);

}  // namespace crumb::server
