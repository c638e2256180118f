// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cuda/evict/evict.h"
#include "kernels/quantize.h"
#include "kernels/tile.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/device_buffer.h"

// Common inputs of the eviction tests: rings, constants and tiles on host and device.
namespace crumb::kernels::cuda {

inline constexpr int kEvictRing = 71;  // slots of a ring

// Returns a random strictly upper triangular matrix [dim, dim], row-major, whose entries decay like
// those of a damped factorization.
std::vector<float> RandomFeedback(int dim, std::mt19937& random);
// Sets the weights of a metric on the diagonal of `feedback`, spread over two orders of magnitude.
void AddWeights(int dim, std::mt19937& random, std::vector<float>& feedback);

// Sets ring_capacity and all strides of `params` for rings of [windows, layers, KV heads, K and V,
// slots, head_dim] rows and tiles of [windows, layers, KV heads]. REQUIRES: the other sizes are
// set.
void SetStrides(EvictParams* params);

// Returns the 64 rows of K, then those of V, from the oldest on. `ring` is [2, kEvictRing, dim];
// the oldest row is in slot `begin`.
std::vector<Bf16> WindowOfRing(const Bf16* ring, int begin, int dim);

// Constants of all layers and heads, for K and V, on the device.
class EvictConstants {
 public:
  // Uploads rotation and feedback [2, matrices, dim, dim] and mean [2, matrices, position blocks,
  // dim].
  void Upload(const std::vector<float>& rotation, const std::vector<float>& feedback,
              const std::vector<float>& mean, int dim);

  // Returns the transform of K (0) or V (1) from its first matrix on, without clip.
  EvictTransform Of(int value) const;

 private:
  int dim_ = 0;
  size_t matrices_ = 0;  // matrices of K, and of V
  DeviceBuffer rotation_, feedback_, mean_;
};

// Return whether the codes, or any bytes, of row `t` differ between two tiles.
bool CodesDiffer(const TileShape& shape, const uint8_t* a, const uint8_t* b, TilePart part, int t);
bool RowDiffers(const TileShape& shape, const uint8_t* a, const uint8_t* b, TilePart part, int t);

// Returns the number of codes that differ between tiles of one shape, and their total in *codes.
size_t DifferentCodes(const TileShape& shape, const std::vector<uint8_t>& a,
                      const std::vector<uint8_t>& b, size_t* codes);

// Returns y of one row in double precision.
std::vector<double> ExactRow(const Bf16* x, int dim, const RowTransform& t);

// Returns one element of a tile: minimum + scale * code.
double Dequantized(const TileShape& shape, const uint8_t* tile, TilePart part, int t, int channel);

// Returns |(y - z) (I + U)|^2 of one row, where z is the tile's row.
double WeightedError(const TileShape& shape, const uint8_t* tile, TilePart part, int t,
                     const std::vector<double>& y, const float* feedback);

}  // namespace crumb::kernels::cuda
