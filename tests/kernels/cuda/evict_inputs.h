// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cuda/evict/evict.h"
#include "kernels/tile.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/device_buffer.h"

// What tests of evicting share: rings, constants and tiles on both sides.
namespace crumb::kernels::cuda {

inline constexpr int kEvictRing = 71;  // slots of a ring

// Strictly upper, entries as a damped factorization gives them: [dim, dim] row-major.
std::vector<float> RandomFeedback(int dim, std::mt19937& random);

// Sets ring_capacity and all strides of `params`, whose other sizes are set: rings of [windows,
// layers, KV heads, K and V, slots, head_dim] rows, tiles of [windows, layers, KV heads].
void SetStrides(EvictParams* params);

// The 64 rows of K, then those of V, from the oldest on. `ring` [2, kEvictRing, dim]; the oldest
// row is in slot `begin`.
std::vector<Bf16> WindowOfRing(const Bf16* ring, int begin, int dim);

// Constants of the K and V matrices of all layers and heads on the device.
class EvictConstants {
 public:
  // rotation, feedback [2, matrices, dim, dim]; mean [2, matrices, position blocks, dim].
  void Upload(const std::vector<float>& rotation, const std::vector<float>& feedback,
              const std::vector<float>& mean, int dim);

  // Of K (0) or V (1), beginning with its first matrix; no clip.
  EvictTransform Of(int value) const;

 private:
  int dim_ = 0;
  size_t matrices_ = 0;  // of K, and of V
  DeviceBuffer rotation_, feedback_, mean_;
};

// Whether codes, or anything, of row `t` differ between two tiles.
bool CodesDiffer(const TileShape& shape, const uint8_t* a, const uint8_t* b, TilePart part, int t);
bool RowDiffers(const TileShape& shape, const uint8_t* a, const uint8_t* b, TilePart part, int t);

}  // namespace crumb::kernels::cuda
