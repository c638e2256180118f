// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/scratch.h"
#include "kernels/tile_codec.h"

// Unpacks a tile's codes into panels of one code per byte, ordered so that four codes of a sum lie
// in one 32-bit lane (docs/kernels/cpu.md, "Panels"). All query rows of a block read the same
// panels.
namespace crumb::kernels {

// Splits the 16 codes of every word into four words of four byte codes each: out[(stride_words per
// step) * q + lane] for q = 0 to 3.
template <typename V>
void SplitWords(const uint32_t* words, int stride_words, uint8_t* out) {
  const typename V::I mask = V::SetI(0x03030303);
  for (int lane = 0; lane < 16; lane += V::kLanes) {
    const typename V::I word = V::LoadI(words + lane);
    uint8_t* to = out + 4 * lane;
    const int step = 4 * stride_words;
    V::StoreI(to, V::AndI(word, mask));
    V::StoreI(to + step, V::AndI(V::template ShiftRight<2>(word), mask));
    V::StoreI(to + 2 * step, V::AndI(V::template ShiftRight<4>(word), mask));
    V::StoreI(to + 3 * step, V::AndI(V::template ShiftRight<6>(word), mask));
  }
}

// Sets scratch.k_panel and scratch.v_panel.
template <typename V>
void UnpackCodes(const TileShape& shape, const uint8_t* tile, const AttendScratch& scratch) {
  const int d = shape.head_dim;
  const int units = d == 64 ? 4 : 8;  // 64-bit units of one r in one block of words
  const int blocks = d == 256 ? 2 : 1;
  const int steps = units / 4;  // steps of 64 channels in a block: units are (c, step)
  for (int u = 0; u < shape.tokens / 16; ++u) {
    for (int block = 0; block < blocks; ++block) {
      const uint8_t* k_rows = tile + 4 * d * u + 512 * block;
      const uint8_t* v_rows = k_rows + shape.code_bytes();
      V::TransposeUnits(k_rows, units, TilePart::kKey, scratch.units);
      for (int unit = 0; unit < units; ++unit) {
        const int c = unit / steps, s = block * steps + unit % steps;
        uint8_t* to = scratch.k_panel + static_cast<int64_t>(64) * (u * (d / 4) + 16 * s + 4 * c);
        SplitWords<V>(scratch.units + 16 * unit, 16, to);
      }
      V::TransposeUnits(v_rows, units, TilePart::kValue, scratch.units);
      for (int unit = 0; unit < units; ++unit) {
        const int c = unit / steps, s = block * steps + unit % steps;
        uint8_t* to = scratch.v_panel + 4 * (static_cast<int64_t>(4 * u + c) * d + 64 * s);
        SplitWords<V>(scratch.units + 16 * unit, 16, to);
      }
    }
  }
}

// Sets scratch.k_scale, k_minimum, v_scale and v_minimum. Lane 2 r + a of 16-token group u is token
// 16 u + 8 a + r.
template <typename V>
void UnpackMeta(const TileShape& shape, const uint8_t* tile, const AttendScratch& scratch) {
  const int tokens = shape.tokens, rows = shape.groups();
  const uint8_t* meta = tile + 2 * shape.code_bytes();
  for (int y = 0; y < 2 * rows; ++y) {
    for (int r = 0; r < 8; ++r) {
      for (int u = 0; u < tokens / 16; ++u) {
        std::memcpy(scratch.meta + y * tokens + 16 * u + 2 * r,
                    meta + 4 * tokens * y + tokens / 2 * r + 8 * u, 8);
      }
    }
  }
  const auto split = [&](const uint32_t* pairs, float* scale, float* minimum) {
    for (int i = 0; i < rows * tokens; i += V::kLanes) {
      typename V::F s, m;
      V::SplitHalves(V::LoadI(pairs + i), &s, &m);
      V::Store(scale + i, s);
      V::Store(minimum + i, m);
    }
  };
  split(scratch.meta, scratch.k_scale, scratch.k_minimum);
  split(scratch.meta + rows * tokens, scratch.v_scale, scratch.v_minimum);
}

}  // namespace crumb::kernels
