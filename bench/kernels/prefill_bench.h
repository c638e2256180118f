// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "kernels/cuda/prefill/prefill_tuning.h"

// Times prefill attention of one layer: fresh tokens of one sequence attend a sink of 64 tokens and
// INT2 pages at permuted addresses. Rotations and inverse rotations are included. head_dim and G
// are 128 unless the row names others; rows named "warp" use mma.sync on every device.
// bench/kernels/baseline.py times dense BF16 attention on the same shapes.
namespace crumb::bench {

struct PrefillWorkload {
  std::string name;
  int q_heads = 32;
  int kv_heads = 8;
  int fresh = 4096;
  int cached = 32768;  // tokens, including the sink
  int group_size = 128;
  int head_dim = 128;
  float soft_cap = 0.0f;
  kernels::cuda::PrefillMma mma = kernels::cuda::PrefillMma::kAuto;
};

struct PrefillResult {
  double us = 0.0;
  double tflops = 0.0;     // 4 d Hq (fresh cached + fresh^2 / 2) / time
  double rel_error = 0.0;  // largest error of the checked rows
};

// Times one workload on the current device and compares some rows with the CPU's.
PrefillResult RunPrefill(const PrefillWorkload& workload);

std::vector<PrefillWorkload> StandardPrefillWorkloads();

}  // namespace crumb::bench
