// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/errno_status.h"

#include <cerrno>
#include <system_error>

namespace crumb {
namespace {

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::StatusCode::kResourceExhausted;
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOTDIR:
      return absl::StatusCode::kFailedPrecondition;
    case EAGAIN:
    case EINTR:
    case ECONNREFUSED:
      return absl::StatusCode::kUnavailable;
    case EADDRINUSE:
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EINVAL:
      return absl::StatusCode::kInvalidArgument;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status ErrnoStatus(int error, const std::string& what) {
  return absl::Status(CodeOf(error), what + ": " + std::generic_category().message(error));
}

}  // namespace crumb
