// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "kernels/cuda/prefill/prefill_tuning.h"

// Times prefill attention of one layer: fresh tokens of one sequence over a sink of 64 tokens and
// INT2 pages at permuted addresses, rotations and un-rotation included. head_dim 128, G = 128
// unless said; rows named "warp" and those with a cap or another head_dim go by products of one
// warp on every device. bench/kernels/baseline.py times dense BF16 attention on the same shapes.
namespace crumb::bench {

struct PrefillWorkload {
  std::string name;
  int q_heads = 32;
  int kv_heads = 8;
  int fresh = 4096;
  int cached = 32768;  // sink included
  int group_size = 128;
  int head_dim = 128;
  float soft_cap = 0.0f;
  kernels::cuda::PrefillMma mma = kernels::cuda::PrefillMma::kAuto;
};

struct PrefillResult {
  double us = 0.0;
  double tflops = 0.0;     // 4 d Hq (fresh cached + fresh^2 / 2) / time
  double rel_error = 0.0;  // worst of the checked rows
};

PrefillResult RunPrefill(const PrefillWorkload& workload);

std::vector<PrefillWorkload> StandardPrefillWorkloads();

}  // namespace crumb::bench
