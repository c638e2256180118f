// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode_workload.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bench/run_program.h"

namespace crumb::bench {

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
