// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "bench/codec_workload.h"
#include "bench/gpu_programs.h"
#include "bench/quality_workload.h"
#include "bench/replay_workload.h"
#include "bench/simulate_workload.h"
#include "bench/store_workload.h"
#include "tools/cli.h"

// The arguments of `crumb-bench`, as data.
namespace crumb::bench {

using tools::EarlyExit;
using tools::kExitFailure;
using tools::kExitUsage;

struct CommandLine {
  bool json = false;
  std::variant<CodecOptions, StoreWorkloadOptions, ReplayOptions, SimulateOptions, QualityOptions,
               KernelsOptions, DecodeOptions>
      workload;
};

// Parses the arguments of main. Never throws. `program_folder` is the folder of crumbd,
// crumb-fragment-server, crumb-kernel-bench and crumb-decode-bench.
std::variant<CommandLine, EarlyExit> ParseCommandLine(int argc, const char* const* argv,
                                                      const std::string& program_folder);

}  // namespace crumb::bench
