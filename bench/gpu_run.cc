// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_run.h"

namespace crumb::bench {

void GpuRun::SetCommand(const char* program, int argc, const char* const* argv) {
  command = program;
  for (int i = 1; i < argc; ++i) command.append(" ").append(argv[i]);
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return quoted + "\"";
}

std::string GpuRunJson(const GpuRun& run) {
  return "\"device\": " + Quoted(run.device) +
         ", \"multiprocessors\": " + std::to_string(run.multiprocessors) +
         ", \"driver\": " + Quoted(run.driver) +
         ", \"driver_cuda\": " + std::to_string(run.driver_cuda) +
         ", \"cuda\": " + std::to_string(run.cuda) + ", \"commit\": " + Quoted(run.commit) +
         ", \"command\": " + Quoted(run.command);
}

std::string GpuRunText(const GpuRun& run) {
  return run.device + ", " + std::to_string(run.multiprocessors) + " multiprocessors, driver " +
         run.driver + " of CUDA " + std::to_string(run.driver_cuda) + ", runtime " +
         std::to_string(run.cuda);
}

}  // namespace crumb::bench
