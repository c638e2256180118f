// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_programs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace crumb::bench {
namespace {

// Replaces this process by the program arguments[0].
absl::Status RunCudaProgram(std::vector<std::string> arguments) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  if (errno == ENOENT) {
    return absl::NotFoundError(arguments[0] +
                               " does not exist: only a build with -DCRUMB_CUDA=ON has it");
  }
  return absl::UnavailableError("cannot run " + arguments[0] + ": " + std::strerror(errno));
}

}  // namespace

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
  return RunCudaProgram(KernelsArguments(options, json, commit));
}

std::vector<std::string> DecodeArguments(const DecodeOptions& options, bool json,
                                         const std::string& commit) {
  std::vector<std::string> arguments = {options.program,
                                        "--shape",
                                        fmt::format("{}", fmt::join(options.shapes, ",")),
                                        "--context",
                                        std::to_string(options.context),
                                        "--batch",
                                        fmt::format("{}", fmt::join(options.batches, ",")),
                                        "--kv",
                                        fmt::format("{}", fmt::join(options.formats, ",")),
                                        "--memory-gb",
                                        fmt::format("{}", options.memory_gb)};
  if (json) arguments.insert(arguments.end(), {"--json", "--commit", commit});
  return arguments;
}

absl::Status RunDecode(const DecodeOptions& options, bool json, const std::string& commit) {
  return RunCudaProgram(DecodeArguments(options, json, commit));
}

}  // namespace crumb::bench
