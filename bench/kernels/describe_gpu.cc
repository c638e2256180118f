// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_run.h"

#include <cuda_runtime_api.h>

#include <fstream>
#include <string>

namespace crumb::bench {
namespace {

// The version of the kernel driver, or "unknown" if it does not publish one.
std::string DriverVersion() {
  std::ifstream file("/proc/driver/nvidia/version");
  // NVRM version: NVIDIA UNIX ... Kernel Module  580.95.05  ...
  for (std::string word; file >> word;) {
    if (word.find_first_not_of("0123456789.") == std::string::npos &&
        word.find('.') != std::string::npos) {
      return word;
    }
  }
  return "unknown";
}

}  // namespace

std::string DescribeGpu(int ordinal, GpuRun* run) {
  cudaDeviceProp device;
  cudaError_t error = cudaGetDeviceProperties(&device, ordinal);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&run->driver_cuda);
  if (error == cudaSuccess) error = cudaRuntimeGetVersion(&run->cuda);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  run->device = device.name;
  run->multiprocessors = device.multiProcessorCount;
  run->driver = DriverVersion();
  return "";
}

}  // namespace crumb::bench
