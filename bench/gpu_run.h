// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace crumb::bench {

// What every result of a GPU says beside its numbers. No CUDA: bench/kernels/ask_gpu.h fills it.
struct GpuRun {
  std::string device = "none";  // "NVIDIA H200"
  int multiprocessors = 0;
  std::string driver = "unknown";  // "580.95.05"
  int driver_cuda = 0;             // newest CUDA that the driver serves: 13000
  int cuda = 0;                    // runtime that the program was built with
  std::string commit = "unknown";
  std::string command;  // the program and its arguments

  // `program` without a path, which is the machine's own affair.
  void SetCommand(const char* program, int argc, const char* const* argv);
};

// The members of a JSON object, for between its braces: no comma before or behind.
std::string GpuRunJson(const GpuRun& run);
// The same without commit and command, a line without its end.
std::string GpuRunText(const GpuRun& run);

// `text` as a JSON string.
std::string Quoted(const std::string& text);

}  // namespace crumb::bench
