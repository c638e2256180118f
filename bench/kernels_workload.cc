// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels_workload.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace crumb::bench {

std::vector<std::string> KernelsArguments(const KernelsOptions& options, bool json,
                                          const std::string& commit) {
  std::vector<std::string> arguments = {options.program};
  if (json) arguments.insert(arguments.end(), {"--json", "--commit", commit});
  if (!options.only.empty()) {
    std::string rows;
    for (const int row : options.only) rows += (rows.empty() ? "" : ",") + std::to_string(row);
    arguments.insert(arguments.end(), {"--only", rows});
  }
  return arguments;
}

absl::Status RunKernels(const KernelsOptions& options, bool json, const std::string& commit) {
  std::vector<std::string> arguments = KernelsArguments(options, json, commit);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(options.program.c_str(), argv.data());
  if (errno == ENOENT) {
    return absl::NotFoundError(options.program +
                               " is not there: it is built with -DCRUMB_CUDA=ON only");
  }
  return absl::UnavailableError("cannot run " + options.program + ": " + std::strerror(errno));
}

}  // namespace crumb::bench
