// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace crumb {

// Gives `write` a stream to a temporary file beside `path` and then renames that file to `path`, so
// that `path` is never half-written. On an error of the file system the temporary file is removed.
absl::Status WriteAtomically(const std::string& path,
                             const std::function<void(std::ostream&)>& write);

// The error that WriteAtomically would end with for want of a folder, of permission, or because
// `path` is a folder. Callers check it before the work whose result goes there. Leaves no file.
absl::Status CheckWritable(const std::string& path);

}  // namespace crumb
