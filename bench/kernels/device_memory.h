// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "bench/kernels/device_rates.h"

// Device memory that a workload owns. If a call fails, the program ends with a message.
namespace crumb::bench {

struct CudaFree {
  void operator()(void* p) const { cudaFree(p); }
};
template <typename T>
using Device = std::unique_ptr<T, CudaFree>;

template <typename T>
Device<T> Allocate(size_t count) {
  void* p = nullptr;
  Check(cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T)), "malloc");
  return Device<T>(static_cast<T*>(p));
}
template <typename T>
Device<T> Upload(const std::vector<T>& host) {
  Device<T> device = Allocate<T>(host.size());
  Check(cudaMemcpy(device.get(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
        "upload");
  return device;
}
template <typename T>
std::vector<T> Download(const T* device, size_t count) {
  std::vector<T> host(count);
  Check(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return host;
}

}  // namespace crumb::bench
