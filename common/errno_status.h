// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"

namespace crumb {

// The absl::Status for an errno value: ENOENT kNotFound; ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM
// kResourceExhausted; EACCES, EPERM, EROFS kFailedPrecondition; EAGAIN, EINTR, ECONNREFUSED
// kUnavailable; EADDRINUSE kAlreadyExists; EINVAL kInvalidArgument; others kInternal. The message
// is `what`, a colon and strerror(error).
absl::Status ErrnoStatus(int error, const std::string& what);

}  // namespace crumb
