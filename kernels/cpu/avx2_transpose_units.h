// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/tile_codec.h"

namespace crumb::kernels {

// The shuffle that orders the bytes (b, e, half) of each 64 bits as (half, e, b).
template <typename V>
__m128i PairTokensOrder() {
  return _mm_setr_epi8(0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15);
}

// Simd::TransposeUnits with 32-byte vectors: 4 x 4 transposes of 64-bit units.
template <typename V>
void TransposeUnits256(const uint8_t* rows, int units, TilePart part, uint32_t* out) {
  const __m256i order = _mm256_broadcastsi128_si256(PairTokensOrder<V>());
  for (int first = 0; first < units; first += 4) {
    for (int half = 0; half < 2; ++half) {
      __m256i x[4];
      for (int i = 0; i < 4; ++i) {
        const uint8_t* row = rows + 8 * (units * (4 * half + i) + first);
        x[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
        if (part == TilePart::kValue) x[i] = _mm256_shuffle_epi8(x[i], order);
      }
      const __m256i a = _mm256_unpacklo_epi64(x[0], x[1]), b = _mm256_unpackhi_epi64(x[0], x[1]);
      const __m256i c = _mm256_unpacklo_epi64(x[2], x[3]), d = _mm256_unpackhi_epi64(x[2], x[3]);
      const __m256i transposed[4] = {
          _mm256_permute2x128_si256(a, c, 0x20), _mm256_permute2x128_si256(b, d, 0x20),
          _mm256_permute2x128_si256(a, c, 0x31), _mm256_permute2x128_si256(b, d, 0x31)};
      for (int i = 0; i < 4; ++i) {
        uint32_t* to = out + 16 * (first + i) + 8 * half;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), transposed[i]);
      }
    }
  }
}

}  // namespace crumb::kernels
