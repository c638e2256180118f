// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/device_cache_layout.h"

#include <cstdint>
#include <memory>

#include "fmt/format.h"

namespace crumb::client {
namespace {

constexpr int64_t kRowAlignment = 16;  // bytes, of the kernels' loads and stores
constexpr int kBlockTokensMax = 128;

bool SameStrides(const PagedRows& a, const PagedRows& b) {
  return a.block_stride == b.block_stride && a.head_stride == b.head_stride &&
         a.token_stride == b.token_stride && a.element_stride == b.element_stride;
}

bool Aligned(const PagedRows& rows, int64_t element_bytes) {
  return reinterpret_cast<uint64_t>(rows.base) % kRowAlignment == 0 &&
         rows.block_stride * element_bytes % kRowAlignment == 0 &&
         rows.head_stride * element_bytes % kRowAlignment == 0 &&
         rows.token_stride * element_bytes % kRowAlignment == 0;
}

}  // namespace

absl::StatusOr<kernels::cuda::PagedKv> DeviceLayoutOf(const PagedCache& cache) {
  const PagedRows& first = cache.layers.front().k;
  const int64_t element_bytes = cache.element == RowElement::kFp8E4m3 ? 1 : 2;
  for (const PagedCache::Layer& layer : cache.layers) {
    for (const PagedRows* rows : {&layer.k, &layer.v}) {
      if (!SameStrides(*rows, first)) {
        return absl::InvalidArgumentError(
            "in device memory K and V of all layers have the same strides");
      }
      if (rows->element_stride != 1 || !Aligned(*rows, element_bytes)) {
        return absl::InvalidArgumentError(
            "in device memory the elements of a row are adjacent, and rows are aligned to 16 "
            "bytes");
      }
    }
  }
  if (cache.block_tokens > kBlockTokensMax || cache.blocks > INT32_MAX) {
    return absl::InvalidArgumentError(
        fmt::format("{} blocks of {} tokens: in device memory a cache has at most 2^31 - 1 blocks "
                    "of at most {} tokens",
                    cache.blocks, cache.block_tokens, kBlockTokensMax));
  }
  kernels::cuda::PagedKv kv;
  kv.element = cache.element == RowElement::kFp8E4m3 ? kernels::cuda::KvElement::kFp8E4m3
                                                     : kernels::cuda::KvElement::kBf16;
  kv.block_tokens = cache.block_tokens;
  kv.block_stride = first.block_stride * element_bytes;
  kv.token_stride = first.token_stride * element_bytes;
  kv.head_stride = first.head_stride * element_bytes;
  return kv;
}

ModelBasisMeans ModelBasisMeansOf(const WorkerOptions& options) {
  const int dim = options.head_dim, heads = options.own_kv_heads();
  const int blocks = options.rotations.position_blocks();
  ModelBasisMeans means;
  for (const std::shared_ptr<const RotationSet::Layer>& layer :
       options.rotations.Expand(options.own_tiles(), options.own_q_head_range())) {
    for (int row = 0; row < heads * blocks; ++row) {
      const int head = row / blocks, block = row % blocks;
      for (int i = 0; i < dim; ++i) {
        if (layer->mean_k_columns() != nullptr) {
          means.k.push_back(layer->mean_k_columns()[(int64_t{head} * dim + i) * blocks + block]);
        }
        if (layer->rotated_mean_v() == nullptr) continue;
        const float* rotated = layer->rotated_mean_v() + int64_t{head} * dim;
        if (layer->rotation_v() == nullptr) {
          means.v.push_back(rotated[i]);
          continue;
        }
        // mu = (mu R) Q'
        const float* matrix_row = layer->dual_v() + (int64_t{head} * dim + i) * dim;
        double sum = 0.0;
        for (int j = 0; j < dim; ++j) sum += double{rotated[j]} * matrix_row[j];
        means.v.push_back(static_cast<float>(sum));
      }
    }
  }
  return means;
}

}  // namespace crumb::client
