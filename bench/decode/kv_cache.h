// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/kernels/device_memory.h"
#include "bench/kernels/evict_transforms.h"
#include "bench/model_shape.h"
#include "kernels/cuda/decode/decode_attention.h"
#include "kernels/cuda/evict/evict.h"
#include "models/cuda/layer_kernels.h"

// Random keys and values of a batch in one of two formats, and attention over them.
namespace crumb::bench {

inline constexpr int kHeadDim = 128;  // head_dim of all models that are measured

class KvCache {
 public:
  virtual ~KvCache() = default;

  // Plans attention; once per step, before the first layer.
  virtual void Plan(cudaStream_t stream) const = 0;
  // Sets the destination of NormRopeAppend for new rows of `layer`, and the offsets that attention
  // needs.
  virtual void SetAppend(int layer, models::cuda::RopeParams* p) const = 0;
  // Computes attention of `layer`; q and out are device [batch, q_heads, 128].
  virtual void Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out,
                      cudaStream_t stream) const = 0;
  // Evicts the oldest 64 recent tokens of every sequence and all layers into pages.
  virtual bool Evicts() const = 0;
  virtual void Evict(cudaStream_t stream) const = 0;
};

// Dense BF16 rows in one allocation.
class Bf16KvCache : public KvCache {
 public:
  Bf16KvCache(const ModelShape& model, const SequenceShape& sequence, int batch);

  void Plan(cudaStream_t) const override {}
  void SetAppend(int layer, models::cuda::RopeParams* p) const override;
  void Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out,
              cudaStream_t stream) const override;
  bool Evicts() const override { return false; }
  void Evict(cudaStream_t) const override {}

 private:
  kernels::cuda::Bf16Rows Rows(int layer) const;

  const ModelShape model_;
  const int batch_, tokens_;
  Device<kernels::Bf16> rows_;  // [batch, layers, kv_heads, {K, V}, tokens, 128]
  Device<uint64_t> address_;
  Device<int32_t> begin_, count_;
  Device<uint8_t> workspace_;
};

// A BF16 sink and recent ring, and INT2 pages at permuted addresses; K and V are rotated and
// centred.
class Int2KvCache : public KvCache {
 public:
  Int2KvCache(const ModelShape& model, const SequenceShape& sequence, int batch);

  void Plan(cudaStream_t stream) const override;
  void SetAppend(int layer, models::cuda::RopeParams* p) const override;
  void Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out,
              cudaStream_t stream) const override;
  bool Evicts() const override { return true; }
  void Evict(cudaStream_t stream) const override;

 private:
  // Return the sizes, lengths and rows as the kernels take them.
  kernels::cuda::DecodeShape Shape() const;
  kernels::cuda::DecodeLengths Lengths() const;
  kernels::cuda::Bf16Rows Ring(int layer) const;
  // Make the page table, the rotations and means, and the parameters of eviction, on the device.
  void MakeTable();
  void MakeTransforms();
  void MakeEvict();

  const ModelShape model_;
  const SequenceShape sequence_;
  const int batch_;
  const kernels::TileShape tile_;
  const int64_t slot_bytes_;       // bytes of a page, all layers
  const int64_t layer_window_;     // bytes of one layer's sink and ring
  Device<uint8_t> slots_;          // [batch * pages + batch]; evictions write the last ones
  Device<kernels::Bf16> windows_;  // [batch, layers], layer_window_ bytes each
  std::vector<int32_t> begin_host_;
  Device<uint64_t> table_, window_address_;
  Device<int32_t> sink_tokens_, recent_tokens_, pages_, recent_begin_;
  Device<float> rotations_;        // [layers, {K, V}, kv_heads, 128, 128]
  Device<float> mean_k_, mean_v_;  // [layers, kv_heads, 128]
  Device<float> offset_;
  Device<uint8_t> plan_, workspace_;
  EvictTransforms transforms_;
  Device<uint64_t> ring_address_, evict_address_;
  Device<int32_t> windows_count_;
  Device<uint32_t> sums_, status_;
  Device<uint8_t> evict_workspace_;
  kernels::cuda::EvictParams evict_;
};

}  // namespace crumb::bench
