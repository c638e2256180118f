// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels_workload.h"

#include "bench/run_program.h"

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
  return RunCudaProgram(KernelsArguments(options, json, commit));
}

}  // namespace crumb::bench
