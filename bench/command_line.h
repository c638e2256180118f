// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "bench/codec_workload.h"
#include "bench/decode_workload.h"
#include "bench/kernels_workload.h"
#include "bench/quality_workload.h"
#include "bench/replay_workload.h"
#include "bench/simulate_workload.h"
#include "bench/store_workload.h"

// The arguments of `crumb-bench`, as data.
namespace crumb::bench {

inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

struct CommandLine {
  bool json = false;
  std::variant<CodecOptions, StoreWorkloadOptions, ReplayOptions, SimulateOptions, QualityOptions,
               KernelsOptions, DecodeOptions>
      workload;
};

// Nothing is to be run: help or version was asked for (code 0), or the arguments are wrong.
struct EarlyExit {
  int code = 0;
  std::string out;
  std::string error;
};

// Never throws. `argv` as main gets it; `program_folder` is where crumbd,
// crumb-kernel-bench and crumb-decode-bench are looked for.
std::variant<CommandLine, EarlyExit> ParseCommandLine(int argc, const char* const* argv,
                                                      const std::string& program_folder);

}  // namespace crumb::bench
