// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "kernels/tile.h"
#include "models/config.h"
#include "models/cuda/buffer.h"
#include "models/weights.h"

namespace crumb::models::cuda {

// One decoder layer's weights on the device, bf16; projections that read the same rows are one.
struct DeviceLayerWeights {
  Buffer<kernels::Bf16> attention_norm;  // [hidden]
  Buffer<kernels::Bf16> qkv;             // [(q_heads + 2 kv_heads) * head_dim, hidden]
  Buffer<kernels::Bf16> q_norm, k_norm;  // [head_dim]
  Buffer<kernels::Bf16> out;             // [hidden, q_heads * head_dim]
  Buffer<kernels::Bf16> mlp_norm;        // [hidden]
  Buffer<kernels::Bf16> gate_up;         // [2 intermediate, hidden]
  Buffer<kernels::Bf16> down;            // [hidden, intermediate]
};

struct DeviceWeights {
  // Copies to the current device. kResourceExhausted: device memory.
  static absl::StatusOr<DeviceWeights> Copy(const Weights& weights);

  const kernels::Bf16* output() const { return output_proj ? output_proj.get() : embedding.get(); }

  Buffer<kernels::Bf16> embedding;  // [vocab, hidden]
  std::vector<DeviceLayerWeights> layers;
  Buffer<kernels::Bf16> final_norm;   // [hidden]
  Buffer<kernels::Bf16> output_proj;  // [vocab, hidden], null when tied to the embedding
};

}  // namespace crumb::models::cuda
