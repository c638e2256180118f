// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/avx2_transpose_units.h"
#include "kernels/tile.h"

// The vector operations of the kernels with AVX2, FMA and F16C, in 8 lanes. portable_simd.h
// documents the members.
namespace crumb::kernels::avx2 {

struct Simd {
  using F = __m256;
  using I = __m256i;
  using Acc = __m256i;  // 16 sums of two products in 16 bits: 32 steps reach at most 24,576
  using Key = __m256;
  using QueryElement = float;

  static constexpr int kLanes = 8;
  static constexpr int kKeyChannels = 8;
  static constexpr int kScoreRows = 2;
  static constexpr int kScoreVectors = 2;
  static constexpr int kValueRows = 2;
  static constexpr int kValueVectors = 2;
  static constexpr int kBf16ScoreRows = 2;
  static constexpr int kBf16ValueRows = 2;
  static constexpr int kBf16ValueVectors = 4;
  static constexpr int kRotateVectors = 2;

  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F Abs(F a) { return _mm256_and_ps(a, AsFloat(SetI(0x7fffffff))); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F LoadBf16(const Bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return AsFloat(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static float ReduceMax(F x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static float ReduceAdd(F x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static void ReduceAdd4(F x0, F x1, F x2, F x3, float* out) {
    const F s = _mm256_hadd_ps(_mm256_hadd_ps(x0, x1), _mm256_hadd_ps(x2, x3));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }

  static I LoadI(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void StoreI(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static I SetI(int32_t x) { return _mm256_set1_epi32(x); }
  static I AddI(I a, I b) { return _mm256_add_epi32(a, b); }
  static I AndI(I a, I b) { return _mm256_and_si256(a, b); }
  static I MinI(I a, I b) { return _mm256_min_epi32(a, b); }
  static I MaxI(I a, I b) { return _mm256_max_epi32(a, b); }
  template <int kBits>
  static I ShiftRight(I a) {
    return _mm256_srli_epi32(a, kBits);
  }
  template <int kBits>
  static I ShiftRightSigned(I a) {
    return _mm256_srai_epi32(a, kBits);
  }
  static I AsInt(F a) { return _mm256_castps_si256(a); }
  static F AsFloat(I a) { return _mm256_castsi256_ps(a); }
  static F ToFloat(I a) { return _mm256_cvtepi32_ps(a); }
  static I Round(F x) { return _mm256_cvtps_epi32(x); }
  static I Truncate(F x) { return _mm256_cvttps_epi32(x); }
  static I CountGreaterEqual(I counts, I a, I b) {
    // a >= b is the negation of b > a; a comparison that holds is -1.
    return _mm256_add_epi32(_mm256_add_epi32(counts, SetI(1)), _mm256_cmpgt_epi32(b, a));
  }
  static I SelectGreaterEqual(I a, I b, I other) {
    return _mm256_blendv_epi8(a, other, _mm256_cmpgt_epi32(b, a));
  }
  static int32_t ReduceAddI(I x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  static int32_t ReduceMinI(I x) {
    __m128i s = _mm_min_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_min_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_min_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  static int32_t ReduceMaxI(I x) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }

  static F Exp2(F x) {
    const F bounded = Max(x, Set(-126.0f));
    const F whole = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F f = Sub(bounded, whole);
    F p = Set(1.5403530e-4f);
    p = Fma(p, f, Set(1.3333558e-3f));
    p = Fma(p, f, Set(9.6181291e-3f));
    p = Fma(p, f, Set(5.5504109e-2f));
    p = Fma(p, f, Set(2.4022651e-1f));
    p = Fma(p, f, Set(6.9314718e-1f));
    p = Fma(p, f, Set(1.0f));
    const I power = _mm256_slli_epi32(AddI(Round(whole), SetI(127)), 23);
    const F kept = _mm256_cmp_ps(x, Set(-126.0f), _CMP_GE_OQ);
    return _mm256_and_ps(Mul(p, AsFloat(power)), kept);
  }

  static Acc ZeroAcc() { return _mm256_setzero_si256(); }
  static Acc Dot(Acc acc, I codes, I weights) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, weights));
  }
  static I Widen(Acc high, Acc low) {
    const I ones = _mm256_set1_epi16(1);
    return AddI(_mm256_slli_epi32(_mm256_madd_epi16(high, ones), 8), _mm256_madd_epi16(low, ones));
  }
  static I Broadcast32(const void* p) {
    int32_t x;
    __builtin_memcpy(&x, p, sizeof(x));
    return SetI(x);
  }
  static I Broadcast64(const void* p) {
    long long x;
    __builtin_memcpy(&x, p, sizeof(x));
    return _mm256_set1_epi64x(x);
  }
  static void StoreWeights(uint8_t* p, I a, I b) {
    // The shuffle takes bytes 0, 4, 8, 12 of each 16-byte half; the permutation orders the four
    // dwords as a0 b0 a1 b1.
    const I low_bytes = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const I pairs =
        _mm256_unpacklo_epi32(_mm256_shuffle_epi8(a, low_bytes), _mm256_shuffle_epi8(b, low_bytes));
    const I packed = _mm256_permute4x64_epi64(pairs, 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void SplitHalves(I pairs, F* scale, F* minimum) {
    // The shuffle puts four scales, then four minima, into each 16-byte half.
    const I order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const I split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(pairs, order), 0xd8);
    *scale = _mm256_cvtph_ps(_mm256_castsi256_si128(split));
    *minimum = _mm256_cvtph_ps(_mm256_extracti128_si256(split, 1));
  }

  static Key LoadKey(const Bf16* p) { return LoadBf16(p); }
  static const QueryElement* QueryOf(const float* q, const Bf16*) { return q; }
  static F DotKey(F acc, Key key, const QueryElement* q) { return Fma(key, Load(q), acc); }

  static void TransposeUnits(const uint8_t* rows, int units, TilePart part, uint32_t* out) {
    TransposeUnits256<Simd>(rows, units, part, out);
  }
};

}  // namespace crumb::kernels::avx2
