// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace crumb::bench {

// The circumstances of a measurement on a GPU, which every result states beside its figures.
struct GpuRun {
  std::string device = "none";  // "NVIDIA H200"
  int multiprocessors = 0;
  std::string driver = "unknown";  // "580.95.05"
  int driver_cuda = 0;             // newest CUDA that the driver serves: 13000
  int cuda = 0;                    // runtime that the program was built with
  std::string commit = "unknown";
  std::string command;  // the program and its arguments

  // Sets `command` to `program` and its arguments. `program` is a name without a path, because
  // paths differ between machines.
  void SetCommand(const char* program, int argc, const char* const* argv);
};

// The members of a JSON object, without its braces and without a comma before or after them.
std::string GpuRunJson(const GpuRun& run);
// Returns the same data as one line of text without commit, command and line end.
std::string GpuRunText(const GpuRun& run);

// Returns `text` as a JSON string, quoted and escaped.
std::string Quoted(const std::string& text);

// Sets the members of `run` that describe the device of number `ordinal`, the driver and CUDA.
// Returns an empty text, or CUDA's message if the device cannot be used. It is the only function
// here that needs CUDA: its source is bench/kernels/describe_gpu.cc.
std::string DescribeGpu(int ordinal, GpuRun* run);

}  // namespace crumb::bench
