// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cpu/avx2_transpose_units.h"
#include "kernels/tile.h"

// The vector operations of the kernels with AVX-512 (F, BW, VL, DQ), in 16 lanes. portable_simd.h
// documents the members. kDotProducts: the machine also has VNNI (dot products of bytes in 32 bits)
// and BF16 (dot products of bf16 pairs in floats).
namespace crumb::kernels::avx512 {

template <bool kDotProducts>
struct Simd {
  using F = __m512;
  using I = __m512i;
  using Acc = __m512i;  // if no VNNI: 16-bit sums of two byte products (avx2_simd.h)
  using Key = __m512i;  // 32 channels in bf16, or 16 in floats
  using QueryElement = std::conditional_t<kDotProducts, Bf16, float>;

  static constexpr int kLanes = 16;
  static constexpr int kKeyChannels = kDotProducts ? 32 : 16;
  static constexpr int kScoreRows = 4;
  static constexpr int kScoreVectors = 2;
  static constexpr int kValueRows = 2;
  static constexpr int kValueVectors = 4;
  static constexpr int kBf16ScoreRows = 4;
  static constexpr int kBf16ValueRows = 4;
  static constexpr int kBf16ValueVectors = 4;
  static constexpr int kRotateVectors = 4;

  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F Set(float x) { return _mm512_set1_ps(x); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static F Abs(F a) { return _mm512_and_ps(a, AsFloat(SetI(0x7fffffff))); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F LoadBf16(const Bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return AsFloat(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static float ReduceMax(F x) { return _mm512_reduce_max_ps(x); }
  static float ReduceAdd(F x) { return _mm512_reduce_add_ps(x); }
  static void ReduceAdd4(F x0, F x1, F x2, F x3, float* out) {
    const F a = Add(_mm512_unpacklo_ps(x0, x1), _mm512_unpackhi_ps(x0, x1));
    const F b = Add(_mm512_unpacklo_ps(x2, x3), _mm512_unpackhi_ps(x2, x3));
    const F s = Add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
  }

  static I LoadI(const void* p) { return _mm512_loadu_si512(p); }
  static void StoreI(void* p, I x) { _mm512_storeu_si512(p, x); }
  static I SetI(int32_t x) { return _mm512_set1_epi32(x); }
  static I AddI(I a, I b) { return _mm512_add_epi32(a, b); }
  static I AndI(I a, I b) { return _mm512_and_si512(a, b); }
  static I MinI(I a, I b) { return _mm512_min_epi32(a, b); }
  static I MaxI(I a, I b) { return _mm512_max_epi32(a, b); }
  template <int kBits>
  static I ShiftRight(I a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kBits>
  static I ShiftRightSigned(I a) {
    return _mm512_srai_epi32(a, kBits);
  }
  static I AsInt(F a) { return _mm512_castps_si512(a); }
  static F AsFloat(I a) { return _mm512_castsi512_ps(a); }
  static F ToFloat(I a) { return _mm512_cvtepi32_ps(a); }
  static I Round(F x) { return _mm512_cvtps_epi32(x); }
  static I Truncate(F x) { return _mm512_cvttps_epi32(x); }
  static I CountGreaterEqual(I counts, I a, I b) {
    return _mm512_mask_add_epi32(counts, _mm512_cmpge_epi32_mask(a, b), counts, SetI(1));
  }
  static I SelectGreaterEqual(I a, I b, I other) {
    return _mm512_mask_mov_epi32(other, _mm512_cmpge_epi32_mask(a, b), a);
  }
  static int32_t ReduceAddI(I x) { return _mm512_reduce_add_epi32(x); }
  static int32_t ReduceMinI(I x) { return _mm512_reduce_min_epi32(x); }
  static int32_t ReduceMaxI(I x) { return _mm512_reduce_max_epi32(x); }

  static F Exp2(F x) {
    const F whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 kept = _mm512_cmp_ps_mask(x, Set(-126.0f), _CMP_GE_OQ);
    const F f = Sub(x, whole);
    F p = Set(1.5403530e-4f);
    p = Fma(p, f, Set(1.3333558e-3f));
    p = Fma(p, f, Set(9.6181291e-3f));
    p = Fma(p, f, Set(5.5504109e-2f));
    p = Fma(p, f, Set(2.4022651e-1f));
    p = Fma(p, f, Set(6.9314718e-1f));
    p = Fma(p, f, Set(1.0f));
    return _mm512_maskz_scalef_ps(kept, p, whole);
  }

  static Acc ZeroAcc() { return _mm512_setzero_si512(); }
  static Acc Dot(Acc acc, I codes, I weights) {
    if constexpr (kDotProducts) {
      // The instruction is written out because GCC 12 copies and spills the accumulators of the
      // intrinsic.
      asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(weights));
      return acc;
    } else {
      return _mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, weights));
    }
  }
  static I Widen(Acc high, Acc low) {
    if constexpr (kDotProducts) {
      return AddI(_mm512_slli_epi32(high, 8), low);
    } else {
      const I ones = _mm512_set1_epi16(1);
      return AddI(_mm512_slli_epi32(_mm512_madd_epi16(high, ones), 8),
                  _mm512_madd_epi16(low, ones));
    }
  }
  static I Broadcast32(const void* p) {
    int32_t x;
    __builtin_memcpy(&x, p, sizeof(x));
    return SetI(x);
  }
  static I Broadcast64(const void* p) {
    long long x;
    __builtin_memcpy(&x, p, sizeof(x));
    return _mm512_set1_epi64(x);
  }
  static void StoreWeights(uint8_t* p, I a, I b) {
    const __m128i x = _mm512_cvtepi32_epi8(a), y = _mm512_cvtepi32_epi8(b);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi32(x, y));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm_unpackhi_epi32(x, y));
  }
  static void SplitHalves(I pairs, F* scale, F* minimum) {
    *scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    *minimum = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(ShiftRight<16>(pairs)));
  }

  static Key LoadKey(const Bf16* p) {
    if constexpr (kDotProducts) {
      return LoadI(p);
    } else {
      return AsInt(LoadBf16(p));
    }
  }
  static const QueryElement* QueryOf(const float* q, const Bf16* q_bf16) {
    if constexpr (kDotProducts) {
      return q_bf16;
    } else {
      return q;
    }
  }
  static F DotKey(F acc, Key key, const QueryElement* q) {
    if constexpr (kDotProducts) {
      return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(key),
                              reinterpret_cast<__m512bh>(LoadI(q)));
    } else {
      return Fma(AsFloat(key), Load(q), acc);
    }
  }

  static void TransposeUnits(const uint8_t* rows, int units, TilePart part, uint32_t* out) {
    if (units != 8) {
      TransposeUnits256<Simd>(rows, units, part, out);
      return;
    }
    I x[8];
    for (int r = 0; r < 8; ++r) {
      x[r] = LoadI(rows + 64 * r);
      if (part == TilePart::kValue) {
        x[r] = _mm512_shuffle_epi8(x[r], _mm512_broadcast_i32x4(PairTokensOrder<Simd>()));
      }
    }
    for (int odd = 0; odd < 2; ++odd) {
      I t[4];  // rows 2 i and 2 i + 1 of units odd, odd + 2, odd + 4, odd + 6
      for (int i = 0; i < 4; ++i) {
        t[i] = odd == 0 ? _mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1])
                        : _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]);
      }
      const I a = _mm512_shuffle_i32x4(t[0], t[1], 0x44),
              b = _mm512_shuffle_i32x4(t[2], t[3], 0x44);
      const I c = _mm512_shuffle_i32x4(t[0], t[1], 0xee),
              d = _mm512_shuffle_i32x4(t[2], t[3], 0xee);
      StoreI(out + 16 * odd, _mm512_shuffle_i32x4(a, b, 0x88));
      StoreI(out + 16 * (odd + 2), _mm512_shuffle_i32x4(a, b, 0xdd));
      StoreI(out + 16 * (odd + 4), _mm512_shuffle_i32x4(c, d, 0x88));
      StoreI(out + 16 * (odd + 6), _mm512_shuffle_i32x4(c, d, 0xdd));
    }
  }
};

}  // namespace crumb::kernels::avx512
