// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "crumb/transfer.h"
#include "crumb/worker_options.h"
#include "kernels/cuda/pages/paged_kv_call.h"

namespace crumb::client {

// Returns the layout of a cache as the kernels take it, without addresses and block table. The
// kernels take one set of strides for K and V of all layers. kInvalidArgument: strides differ
// between K and V or between layers, elements of a row are not adjacent, rows are not aligned to 16
// bytes, or a block has more than 128 tokens.
absl::StatusOr<kernels::cuda::PagedKv> DeviceLayoutOf(const PagedCache& cache);

// Means that are added to dequantized rows, in the model's basis, for the layers and KV heads of
// this rank: [layers, kv_heads, position_blocks, head_dim]. Empty: zero.
struct ModelBasisMeans {
  std::vector<float> k;
  std::vector<float> v;
};
ModelBasisMeans ModelBasisMeansOf(const WorkerOptions& options);

}  // namespace crumb::client
