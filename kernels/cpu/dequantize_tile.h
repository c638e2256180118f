// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/rotate.h"
#include "kernels/fp16.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"

// Expansion of packed tiles to rows of floats. V is one of the Simd types.
namespace crumb::kernels {

// Expands 64 channels of one row from 8 words: channel 8 j + i is bits 2 j of word i. Metadata is
// passed per half, because groups of 32 channels have metadata of their own.
template <typename V>
void ExpandWords(const uint32_t words[8], const float scale[2], const float minimum[2],
                 float* out) {
  for (int j = 0; j < 8; ++j) {
    const float s = scale[j / 4], m = minimum[j / 4];
    for (int i = 0; i < 8; ++i) {
      out[8 * j + i] = m + s * static_cast<float>(static_cast<int32_t>(words[i] >> (2 * j) & 3u));
    }
  }
}

// Loads the eight words of 64 channels from channel 64 * step of `token`, shifted so that the
// token's codes are the lower half. For K word i holds channels 2 c + e = i, for V channel row r =
// i.
template <typename V>
void GatherWords(const TileShape& shape, const uint8_t* codes, int token, int step, TilePart part,
                 uint32_t words[8]) {
  const bool values = part == TilePart::kValue;
  const int width = shape.head_dim == 64 ? 2 : 4;
  const int u = token / 16, a = token % 16 / 8;
  for (int i = 0; i < 8; ++i) {
    const int lane = values ? 4 * i + token % 8 / 2 : 4 * (token % 8) + i / 2;
    const int word = 2 * step + a;
    uint32_t packed;
    std::memcpy(&packed,
                codes + 4 * shape.head_dim * u + 128 * width * (word / width) + 4 * width * lane +
                    4 * (word % width),
                4);
    words[i] = packed >> (values ? 16 * (token % 2) : 16 * (i % 2));
  }
}

template <typename V>
void DequantizeHalf(const TileShape& shape, const uint8_t* codes, const uint8_t* meta,
                    TilePart part, float* out) {
  for (int token = 0; token < shape.tokens; ++token) {
    const int r = token % 8, a = token % 16 / 8, u = token / 16;
    const uint8_t* row_meta = meta + shape.tokens / 2 * r + 4 * (2 * u + a);
    for (int step = 0; step < shape.head_dim / 64; ++step) {
      float scale[2], minimum[2];
      for (int half = 0; half < 2; ++half) {
        const int group = (64 * step + 32 * half) / shape.group_size;
        uint32_t pair;
        std::memcpy(&pair, row_meta + 4 * shape.tokens * group, 4);
        scale[half] = Fp16ToFloat(static_cast<uint16_t>(pair));
        minimum[half] = Fp16ToFloat(static_cast<uint16_t>(pair >> 16));
      }
      uint32_t words[8];
      GatherWords<V>(shape, codes, token, step, part, words);
      ExpandWords<V>(words, scale, minimum,
                     out + static_cast<int64_t>(token) * shape.head_dim + 64 * step);
    }
  }
}

template <typename V>
void DequantizeWholeTile(const TileShape& shape, const uint8_t* tile, float* k, float* v) {
  const uint8_t* meta = tile + 2 * shape.code_bytes();
  if (k != nullptr) DequantizeHalf<V>(shape, tile, meta, TilePart::kKey, k);
  if (v != nullptr) {
    DequantizeHalf<V>(shape, tile + shape.code_bytes(), meta + shape.meta_bytes(), TilePart::kValue,
                      v);
  }
}

template <typename V>
void RowsToModel(const RowTransform& transform, int dim, int count, float* rows) {
  constexpr int kBlock = 8;  // divides the rows of every tile
  for (int first = 0; first < count; first += kBlock) {
    float* block = rows + static_cast<int64_t>(first) * dim;
    if (transform.mean != nullptr) {
      for (int i = 0; i < kBlock * dim; ++i) block[i] += transform.mean[i % dim];
    }
    if (transform.rotation == nullptr) continue;
    alignas(64) float out[kBlock * 256];
    InverseRotateRows<V>(block, kBlock, dim, transform.inverse(), out);
    std::memcpy(block, out, kBlock * dim * sizeof(float));
  }
}

}  // namespace crumb::kernels
