// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/tile.h"

// BF16 window of tokens <-> INT2 page tile, on the CPU. Rows are independent: one row is one token
// of one KV head, K or V.
namespace crumb::kernels {

// How codes, scale and minimum of a row are chosen. The tile's bytes have one meaning for all.
// kNaive and kHadamard round as kOscar does: what sets them apart is the transform they come with.
enum class Method : uint8_t {
  kOscar = 1,     // rotate, clip the range at an order statistic, round to nearest
  kCrumb = 2,     // and pass rounding errors on by `feedback`, keep each row's inner product
  kHadamard = 3,  // a Hadamard matrix as the rotation
  kNaive = 4,     // no rotation, no clip
};

// "oscar", "crumb", "hadamard", "naive".
std::string_view MethodName(Method method);
// The method of this name, or nothing.
std::optional<Method> MethodNamed(std::string_view name);

// Static data of one (layer, global KV head), for K or for V.
struct RowTransform {
  const float* rotation = nullptr;  // [head_dim, head_dim] row-major, y = x R; null: identity
  const float* mean = nullptr;      // [head_dim] mu R, subtracted after rotation; null: zero
  float clip = 0.0f;                // fraction of |y| kept, (0, 1]; <= 0: no clip
  // [head_dim, head_dim] row-major, kCrumb only: what a channel's error adds to each later channel.
  // Strictly upper triangular (the rest is not read), finite; null: nothing.
  const float* feedback = nullptr;
};

// Bits of the status word a quantize call returns.
inline constexpr uint32_t kStatusNonFinite =
    1;  // a row held NaN or infinity; its dequantized row is 0 (+ mean)
inline constexpr uint32_t kStatusSaturated = 2;  // a scale or minimum was limited to +-65504

struct QuantizeParams {
  TileShape shape;
  Method method = Method::kOscar;
  const Bf16* k = nullptr;  // [tokens, head_dim], rows k_stride elements apart
  const Bf16* v = nullptr;  // [tokens, head_dim], rows v_stride elements apart
  int64_t k_stride = 0;
  int64_t v_stride = 0;
  RowTransform k_transform;
  RowTransform v_transform;
  uint8_t* tile = nullptr;  // out: shape.int2_bytes() bytes, 128-byte aligned
};

// Quantizes one window into one tile. Never writes a non-finite scale or minimum. Returns status
// bits, 0 when nothing was unusual. Deterministic: the same bytes on every back end of the CPU.
uint32_t QuantizeTile(const QuantizeParams& params);

// Expands a tile to y = min + scale * code in rotated, centred order.
// k, v  out [tokens, head_dim] f32, row-major; either may be null.
void DequantizeTile(const TileShape& shape, const uint8_t* tile, float* k, float* v);

// Expands a tile to rows in the model's basis: (y + mu R) R'. Same outputs as DequantizeTile.
void DequantizeTileToModel(const TileShape& shape, const uint8_t* tile,
                           const RowTransform& k_transform, const RowTransform& v_transform,
                           float* k, float* v);

}  // namespace crumb::kernels
