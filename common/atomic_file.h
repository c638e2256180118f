// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace crumb {

// Writes what `write` puts into the stream to a temporary name beside `path` and renames it, so
// that `path` is never half-written. Errors of the file system; then the temporary file is gone.
absl::Status WriteAtomically(const std::string& path,
                             const std::function<void(std::ostream&)>& write);

// The error that WriteAtomically would end with for want of a folder, of permission, or because
// `path` is a folder. Callers check it before the work whose result goes there. Leaves no file.
absl::Status CheckWritable(const std::string& path);

}  // namespace crumb
