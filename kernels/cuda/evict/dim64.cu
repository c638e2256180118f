// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict/launch.cuh"

namespace crumb::kernels::cuda {

EvictLauncher EvictDim64(int group_size, bool feedback) {
  if (group_size == 64) return feedback ? LaunchEvict<64, 64, true> : LaunchEvict<64, 64, false>;
  if (group_size == 32) return feedback ? LaunchEvict<64, 32, true> : LaunchEvict<64, 32, false>;
  return nullptr;
}

}  // namespace crumb::kernels::cuda
