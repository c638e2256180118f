// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace crumb::kernels::cuda {

inline bool HaveDevice() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Skips the test, with a message, on a machine without a GPU.
#define CRUMB_NEEDS_DEVICE() \
  if (!HaveDevice()) GTEST_SKIP() << "needs a CUDA device"

#define ASSERT_CUDA(expression)                                   \
  do {                                                            \
    const cudaError_t error_ = (expression);                      \
    ASSERT_EQ(error_, cudaSuccess) << cudaGetErrorString(error_); \
  } while (false)

// Device memory that is freed with the object. It is filled with 0xff bytes, so that elements that
// were not written are NaN.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes) { Allocate(bytes); }
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& host) {
    Upload(host);
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void Allocate(size_t bytes) {
    cudaFree(data_);
    data_ = nullptr;
    bytes_ = bytes;
    if (cudaMalloc(&data_, bytes == 0 ? 16 : bytes) != cudaSuccess) {
      ADD_FAILURE() << "cannot allocate " << bytes << " bytes on the device";
    }
    Fill(0xff);
  }
  void Fill(int byte) { EXPECT_EQ(cudaMemset(data_, byte, bytes_), cudaSuccess); }

  template <typename T>
  void Upload(const std::vector<T>& host) {
    if (bytes_ != host.size() * sizeof(T) || data_ == nullptr) Allocate(host.size() * sizeof(T));
    EXPECT_EQ(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  template <typename T>
  std::vector<T> Download() const {
    std::vector<T> host(bytes_ / sizeof(T));
    EXPECT_EQ(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace crumb::kernels::cuda
