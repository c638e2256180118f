// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace crumb::bench {

// Replaces this process by a program that only builds with CUDA have, `arguments[0]`: its output
// and exit code are this program's. Returns only when that fails. kNotFound: it is not there.
absl::Status RunCudaProgram(std::vector<std::string> arguments);

}  // namespace crumb::bench
