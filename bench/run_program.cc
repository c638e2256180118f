// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/run_program.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace crumb::bench {

absl::Status RunCudaProgram(std::vector<std::string> arguments) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  if (errno == ENOENT) {
    return absl::NotFoundError(arguments[0] +
                               " is not there: it is built with -DCRUMB_CUDA=ON only");
  }
  return absl::UnavailableError("cannot run " + arguments[0] + ": " + std::strerror(errno));
}

}  // namespace crumb::bench
