// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <random>
#include <vector>

#include "bench/kernels/device_memory.h"
#include "kernels/cuda/evict/evict.h"
#include "kernels/quantize.h"

namespace crumb::bench {

// Rotations, means and feedback of every matrix, each in a place of its own, for K and for V;
// head_dim 128. Waits until they are there.
class EvictTransforms {
 public:
  explicit EvictTransforms(int matrices);

  // Clips as the method oscar uses them.
  void Set(kernels::cuda::EvictParams* p) const;

  // The same of any matrix for the CPU, they are all alike. Points into this object.
  kernels::RowTransform OnHost(float clip, bool feedback) const;

 private:
  kernels::cuda::EvictTransform Of(size_t matrix, float clip) const;
  std::vector<float> RandomFeedback();

  size_t matrices_;
  std::mt19937 random_;
  std::vector<float> host_rotation_, host_feedback_, host_mean_;
  Device<char> rotation_, feedback_;
  Device<float> means_;
};

}  // namespace crumb::bench
