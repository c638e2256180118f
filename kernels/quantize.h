// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/tile.h"

// Conversion between a BF16 window of tokens and an INT2 page tile on the CPU. Rows are independent
// of each other: a row is one token of one KV head, K or V.
namespace crumb::kernels {

// How codes, scale and minimum of a row are chosen. The meaning of a tile's bytes does not depend
// on the method. kNaive and kHadamard round as kOscar does; they differ in their transforms.
enum class Method : uint8_t {
  kOscar = 1,  // rotate, clip the range at an order statistic, round to nearest
  // kOscar, but rounding errors propagate by `feedback` and the row's inner product is kept
  kCrumb = 2,
  kHadamard = 3,  // a Hadamard matrix as the rotation
  kNaive = 4,     // no rotation, no clip
};

// Returns "oscar", "crumb", "hadamard" or "naive".
std::string_view MethodName(Method method);
// Returns the method of this name, or nothing.
std::optional<Method> MethodNamed(std::string_view name);

// Constants of one (layer, global KV head), for K or for V.
struct RowTransform {
  const float* rotation = nullptr;  // [head_dim, head_dim] row-major, y = x R; null: identity
  const float* mean = nullptr;      // [head_dim] mu R, subtracted after rotation; null: zero
  float clip = 0.0f;                // fraction of |y| that is kept, (0, 1]; <= 0: no clip
  // [head_dim, head_dim] row-major, for kCrumb: above the diagonal U, the factors by which a
  // channel's error is added to each later channel; on the diagonal D, the weights of the metric
  // (I + U) D (I + U)' in which a row keeps its inner product with itself. A first weight of 0
  // means that the metric is the identity. Nothing below the diagonal is read. Null: no
  // feedback. REQUIRES: U is finite, and D is all positive or all 0.
  const float* feedback = nullptr;
  // [head_dim, head_dim] row-major, Q with R Q' = I: rows are mapped back by x = y Q'. Null: R is
  // orthogonal, so that Q is R.
  const float* dual = nullptr;

  // Returns whether `feedback` has the weights of a metric.
  bool has_metric() const { return feedback != nullptr && feedback[0] > 0.0f; }
  // Returns Q, or null for the identity.
  const float* inverse() const { return dual != nullptr ? dual : rotation; }
};

// Bits of the status word that a quantize call returns.
inline constexpr uint32_t kStatusNonFinite =
    1;  // a row held NaN or infinity; its dequantized row is 0 (+ mean)
inline constexpr uint32_t kStatusSaturated = 2;  // a scale or minimum was clamped to +-65504

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

// Quantizes one window into one tile. Never writes a scale or minimum that is not finite. Returns
// status bits, or 0 if nothing was unusual. Deterministic: every instruction set produces the same
// bytes.
uint32_t QuantizeTile(const QuantizeParams& params);

// Expands a tile to y = minimum + scale * code in the rotated, centred basis. Outputs k and v are
// [tokens, head_dim] f32, row-major; either may be null.
void DequantizeTile(const TileShape& shape, const uint8_t* tile, float* k, float* v);

// Expands a tile to rows in the model's basis, (y + mu R) R', with the outputs of DequantizeTile.
void DequantizeTileToModel(const TileShape& shape, const uint8_t* tile,
                           const RowTransform& k_transform, const RowTransform& v_transform,
                           float* k, float* v);

}  // namespace crumb::kernels
