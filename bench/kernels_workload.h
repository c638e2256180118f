// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

// Workload `kernels`: the CUDA kernels on the first GPU. They are measured by a program of their
// own, crumb-kernel-bench, which needs nothing but the CUDA runtime; this one runs it.
namespace crumb::bench {

struct KernelsOptions {
  std::string program;    // crumb-kernel-bench, beside crumb-bench
  std::vector<int> only;  // decode rows by number; empty: all rows
};

// The arguments `program` is run with.
std::vector<std::string> KernelsArguments(const KernelsOptions& options, bool json,
                                          const std::string& commit);

// Replaces this process by `program`: its output and exit code are this program's. Returns only
// when that fails. kNotFound: the program is not there, the build had no CUDA.
absl::Status RunKernels(const KernelsOptions& options, bool json, const std::string& commit);

}  // namespace crumb::bench
