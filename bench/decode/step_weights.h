// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "bench/kernels/device_memory.h"
#include "bench/model_shape.h"
#include "kernels/tile.h"

namespace crumb::bench {

// A model's parameters in device memory. They are normal deviates; products are scaled by
// 1 / sqrt(inputs), so that activations stay near 1.
struct StepWeights {
  explicit StepWeights(const ModelShape& model);

  const ModelShape model;
  const size_t qkv_stride, out_stride, gate_up_stride, down_stride;  // elements of one layer
  Device<kernels::Bf16> qkv;         // [layers, qkv_outputs, hidden]
  Device<kernels::Bf16> out;         // [layers, hidden, q_heads * 128]
  Device<kernels::Bf16> gate_up;     // [dense layers, 2 ffn, hidden]
  Device<kernels::Bf16> down;        // [dense layers, hidden, ffn]
  Device<kernels::Bf16> routers;     // [expert layers, experts, hidden]
  Device<uint8_t> experts;           // [expert layers, routed and shared], expert_bytes each
  Device<kernels::Bf16> norms;       // [2 layers + 1, hidden]
  Device<kernels::Bf16> head_norms;  // [layers, {q, k}, 128]
  Device<kernels::Bf16> table;       // [vocabulary, hidden]
  Device<kernels::Bf16> last;        // [vocabulary, hidden]; null if it is the table

  const kernels::Bf16* last_projection() const { return last ? last.get() : table.get(); }
};

// Enqueues one kernel that reads the experts with the given indices, as fast as memory allows, and
// computes nothing with them.
//   experts  device, expert i at i * bytes; bytes is a multiple of 16
//   ids      device [count]
//   unused   device [1]
cudaError_t ReadExperts(const uint8_t* experts, int64_t bytes, const int32_t* ids, int count,
                        uint32_t* unused, cudaStream_t stream);

}  // namespace crumb::bench
