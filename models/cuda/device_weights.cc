// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/device_weights.h"

#include <cstring>
#include <initializer_list>

#include "common/status_macros.h"
#include "kernels/bf16.h"

namespace crumb::models::cuda {
namespace {

using kernels::Bf16;

absl::StatusOr<Buffer<Bf16>> CopyVector(const std::vector<float>& values) {
  std::vector<Bf16> rounded;
  rounded.reserve(values.size());
  for (const float x : values) rounded.push_back(kernels::Bf16FromFloat(x));
  return NewBufferOf(std::span<const Bf16>(rounded));
}

void AppendRows(const Matrix& matrix, std::vector<Bf16>* rows) {
  const size_t count = size_t{1} * matrix.rows() * matrix.columns(), begin = rows->size();
  rows->resize(begin + count);
  if (matrix.dtype() == DType::kBf16) {
    std::memcpy(rows->data() + begin, matrix.row(0), count * sizeof(Bf16));
    return;
  }
  const auto* from = reinterpret_cast<const float*>(matrix.row(0));
  for (size_t i = 0; i < count; ++i) (*rows)[begin + i] = kernels::Bf16FromFloat(from[i]);
}

// Copies matrices with the same inputs, one below the other.
absl::StatusOr<Buffer<Bf16>> CopyMatrices(std::initializer_list<const Matrix*> matrices) {
  std::vector<Bf16> rows;
  for (const Matrix* matrix : matrices) AppendRows(*matrix, &rows);
  return NewBufferOf(std::span<const Bf16>(rows));
}

absl::StatusOr<DeviceLayerWeights> CopyLayer(const LayerWeights& from) {
  DeviceLayerWeights to;
  CRUMB_ASSIGN_OR_RETURN(to.attention_norm, CopyVector(from.attention_norm));
  CRUMB_ASSIGN_OR_RETURN(to.qkv, CopyMatrices({&from.q_proj, &from.k_proj, &from.v_proj}));
  CRUMB_ASSIGN_OR_RETURN(to.q_norm, CopyVector(from.q_norm));
  CRUMB_ASSIGN_OR_RETURN(to.k_norm, CopyVector(from.k_norm));
  CRUMB_ASSIGN_OR_RETURN(to.out, CopyMatrices({&from.o_proj}));
  CRUMB_ASSIGN_OR_RETURN(to.mlp_norm, CopyVector(from.mlp_norm));
  CRUMB_ASSIGN_OR_RETURN(to.gate_up, CopyMatrices({&from.gate_proj, &from.up_proj}));
  CRUMB_ASSIGN_OR_RETURN(to.down, CopyMatrices({&from.down_proj}));
  return to;
}

}  // namespace

absl::StatusOr<DeviceWeights> DeviceWeights::Copy(const Weights& weights) {
  DeviceWeights to;
  CRUMB_ASSIGN_OR_RETURN(to.embedding, CopyMatrices({&weights.embedding}));
  for (const LayerWeights& layer : weights.layers) {
    CRUMB_ASSIGN_OR_RETURN(DeviceLayerWeights copied, CopyLayer(layer));
    to.layers.push_back(std::move(copied));
  }
  CRUMB_ASSIGN_OR_RETURN(to.final_norm, CopyVector(weights.final_norm));
  if (weights.output_proj.rows() > 0) {
    CRUMB_ASSIGN_OR_RETURN(to.output_proj, CopyMatrices({&weights.output_proj}));
  }
  return to;
}

}  // namespace crumb::models::cuda
