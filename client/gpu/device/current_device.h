// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace crumb::client {

// CurrentDevice makes a device the calling thread's current one for its own lifetime.
//
// The engine's choice of a current device on its own threads must not change under it. Costs a
// cudaGetDevice, and two cudaSetDevice if the devices differ.
class CurrentDevice {
 public:
  // Errors are left to the calls that follow.
  explicit CurrentDevice(int ordinal) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = ordinal;
    if (before_ != ordinal) cudaSetDevice(ordinal);
    now_ = ordinal;
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (before_ != now_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  int now_ = 0;
};

}  // namespace crumb::client
