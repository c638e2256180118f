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

// Rotations, means and feedback for K and V with head_dim 128, one copy per matrix. The constructor
// waits for the copies.
class EvictTransforms {
 public:
  // With `metric` feedback has weights: a row keeps its inner product in their metric.
  EvictTransforms(int matrices, bool metric);

  // Sets the transforms of `p`, with the clips of the method oscar.
  void Set(kernels::cuda::EvictParams* p) const;

  // Returns the transform for the CPU, which is the same for all matrices. It refers to this
  // object.
  kernels::RowTransform OnHost(float clip, bool feedback) const;

 private:
  kernels::cuda::EvictTransform Of(size_t matrix, float clip) const;
  std::vector<float> RandomFeedback(bool metric);

  size_t matrices_;
  std::mt19937 random_;
  std::vector<float> host_rotation_, host_feedback_, host_mean_;
  Device<char> rotation_, feedback_;
  Device<float> means_;
};

}  // namespace crumb::bench
