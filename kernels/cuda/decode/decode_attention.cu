// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/decode_attention.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/decode/kernels.h"
#include "kernels/cuda/decode/plan.h"

namespace crumb::kernels::cuda {

DecodeLauncher FindDecodeKernel(const TileShape& tile, int query_rows, bool bulk) {
  const int groups = tile.groups();
  switch (tile.head_dim) {
    case 64:
      return groups == 1 ? NarrowInstance<64, 1>(query_rows, bulk)
                         : NarrowInstance<64, 2>(query_rows, bulk);
    case 128:
      if (groups == 1) {
        return query_rows <= 8 ? NarrowInstance<128, 1>(query_rows, bulk)
                               : WideInstance<128, 1>(query_rows, bulk);
      }
      return groups == 2 ? NarrowInstance<128, 2>(query_rows, bulk)
                         : NarrowInstance<128, 4>(query_rows, bulk);
    default:
      if (groups == 2) return NarrowInstance<256, 2>(query_rows, bulk);
      return groups == 4 ? NarrowInstance<256, 4>(query_rows, bulk)
                         : NarrowInstance<256, 8>(query_rows, bulk);
  }
}

bool DecodeSupported(const DecodeShape& shape) {
  return shape.tile.Valid() && shape.tile.tokens == 64 && shape.batch >= 1 &&
         shape.max_pages >= 1 && shape.q_tokens >= 1 && shape.kv_heads >= 1 &&
         shape.q_heads >= shape.kv_heads && shape.q_heads % shape.kv_heads == 0 &&
         shape.query_rows() <= kQueryRowsMax &&
         FindDecodeKernel(shape.tile, LaunchQueryRowsFor(shape.tile, shape.query_rows()), true) !=
             nullptr;
}

cudaError_t DecodeAttention(const DecodeAttentionParams& params, cudaStream_t stream,
                            const DecodeTuning& tuning) {
  DecodeKernelParams k;
  DeviceLimits limits = tuning.limits;
  cudaError_t error = CompleteLimits(&limits);
  if (error == cudaSuccess) error = LaunchOf(params.shape, tuning.form, limits, &k.launch);
  if (error != cudaSuccess) return error;
  k.p = params;
  k.heads = params.shape.q_heads / params.shape.kv_heads;
  k.p.overlap_previous = params.overlap_previous && limits.major >= 9;
  k.scale = params.scale != 0.0f ? params.scale
                                 : 1.0f / std::sqrt(static_cast<float>(params.shape.tile.head_dim));
  k.log2_scale = k.scale * 1.4426950408889634f;
  LayOutPlan(params.shape, k.launch, const_cast<void*>(params.plan), &k.plan);
  LayOutWorkspace(params.shape, k.launch, params.workspace, &k.workspace);
  const bool clusters = k.launch.cluster.taken() || k.launch.cluster.by_plan;
  if (clusters && tuning.copy_path != CopyPath::kAuto) return cudaErrorInvalidValue;
  const bool bulk = tuning.copy_path == CopyPath::kAuto && limits.major >= 9;
  const DecodeLauncher launch =
      clusters ? LaunchClusters : FindDecodeKernel(params.shape.tile, k.launch.query_rows, bulk);
  const int query_rows = params.shape.query_rows();
  for (k.first_row = 0; k.first_row < query_rows; k.first_row += k.launch.query_rows) {
    k.query_rows = std::min(k.launch.query_rows, query_rows - k.first_row);
    error = launch(k, stream);
    if (error != cudaSuccess) return error;
    k.p.overlap_previous = false;  // the next launch uses the same workspace
  }
  return cudaSuccess;
}

}  // namespace crumb::kernels::cuda
