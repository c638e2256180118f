// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/tile_codec.h"

// The vector operations of the kernels in standard C++: 4 lanes by the compiler's vector extension.
// avx2_simd.h and avx512_simd.h have the same members; their contracts are documented here.
namespace crumb::kernels::portable {

struct Simd {
  using F = float __attribute__((vector_size(16)));
  using I = int32_t __attribute__((vector_size(16)));
  // A sum of products of codes and weights before it is widened.
  using Acc = int16_t __attribute__((vector_size(16)));
  // Keys of several channels as they are loaded, and the query that they are multiplied with.
  using Key = F;
  using QueryElement = float;

  static constexpr int kLanes = 4;
  static constexpr int kKeyChannels = 4;   // channels in one Key
  static constexpr int kScoreRows = 2;     // score kernel: query rows in registers
  static constexpr int kScoreVectors = 2;  // score kernel: vectors of tokens in registers
  static constexpr int kValueRows = 2;  // value kernel: rows, and vectors of channels, in registers
  static constexpr int kValueVectors = 2;
  static constexpr int kBf16ScoreRows = 2;  // BF16 score kernel: rows in registers
  static constexpr int kBf16ValueRows = 2;  // BF16 value kernel: rows, and vectors, in registers
  static constexpr int kBf16ValueVectors = 2;
  static constexpr int kRotateVectors = 2;  // rotation: vectors of columns in registers

  static F Load(const float* p) { return LoadAs<F>(p); }
  static void Store(float* p, F x) { std::memcpy(p, &x, sizeof(x)); }
  static F Set(float x) { return F{x, x, x, x}; }
  static F Add(F a, F b) { return a + b; }
  static F Sub(F a, F b) { return a - b; }
  static F Mul(F a, F b) { return a * b; }
  static F Div(F a, F b) { return a / b; }
  static F Min(F a, F b) { return Select(a < b, a, b); }
  static F Max(F a, F b) { return Select(a > b, a, b); }
  static F Abs(F a) { return reinterpret_cast<F>(reinterpret_cast<I>(a) & 0x7fffffff); }
  // a * b + c, fused or not. It is used only where results need not agree between instruction sets.
  static F Fma(F a, F b, F c) { return a * b + c; }
  static F LoadBf16(const Bf16* p) {
    return F{Bf16ToFloat(p[0]), Bf16ToFloat(p[1]), Bf16ToFloat(p[2]), Bf16ToFloat(p[3])};
  }
  static float ReduceMax(F x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
  }
  static float ReduceAdd(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }
  // Sets out[i] to the sum of the lanes of x_i.
  static void ReduceAdd4(F x0, F x1, F x2, F x3, float* out) {
    out[0] = ReduceAdd(x0);
    out[1] = ReduceAdd(x1);
    out[2] = ReduceAdd(x2);
    out[3] = ReduceAdd(x3);
  }

  static I LoadI(const void* p) { return LoadAs<I>(p); }
  static void StoreI(void* p, I x) { std::memcpy(p, &x, sizeof(x)); }
  static I SetI(int32_t x) { return I{x, x, x, x}; }
  static I AddI(I a, I b) { return a + b; }
  static I AndI(I a, I b) { return a & b; }
  static I MinI(I a, I b) { return SelectI(a < b, a, b); }
  static I MaxI(I a, I b) { return SelectI(a > b, a, b); }
  template <int kBits>
  static I ShiftRight(I a) {
    return reinterpret_cast<I>(reinterpret_cast<U>(a) >> kBits);
  }
  template <int kBits>
  static I ShiftRightSigned(I a) {
    return a >> kBits;
  }
  static I AsInt(F a) { return reinterpret_cast<I>(a); }
  static F AsFloat(I a) { return reinterpret_cast<F>(a); }
  static F ToFloat(I a) { return __builtin_convertvector(a, F); }
  // Rounds to nearest even. REQUIRES: |x| < 2^22.
  static I Round(F x) {
    const F magic = Set(0x1.8p23f);
    return reinterpret_cast<I>(x + magic) - reinterpret_cast<I>(magic);
  }
  // Rounds towards zero. REQUIRES: |x| < 2^31.
  static I Truncate(F x) { return __builtin_convertvector(x, I); }
  // Returns counts + 1 in every lane where a >= b, else counts.
  static I CountGreaterEqual(I counts, I a, I b) { return counts - (a >= b); }
  // Returns a where a >= b, else `other`.
  static I SelectGreaterEqual(I a, I b, I other) { return SelectI(a >= b, a, other); }
  static int32_t ReduceAddI(I x) { return x[0] + x[1] + x[2] + x[3]; }
  static int32_t ReduceMinI(I x) {
    const int32_t a = x[0] < x[1] ? x[0] : x[1], b = x[2] < x[3] ? x[2] : x[3];
    return a < b ? a : b;
  }
  static int32_t ReduceMaxI(I x) {
    const int32_t a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
  }

  // Returns 2^x with a relative error of 2e-7, and 0 below x = -126. REQUIRES: x <= 0.
  static F Exp2(F x) {
    const F bounded = Max(x, Set(-126.0f));
    const I whole = Round(bounded);
    const F f = bounded - ToFloat(whole);
    F p = Set(1.5403530e-4f);
    p = p * f + Set(1.3333558e-3f);
    p = p * f + Set(9.6181291e-3f);
    p = p * f + Set(5.5504109e-2f);
    p = p * f + Set(2.4022651e-1f);
    p = p * f + Set(6.9314718e-1f);
    p = p * f + Set(1.0f);
    const F scaled = p * reinterpret_cast<F>((whole + 127) << 23);
    return reinterpret_cast<F>(reinterpret_cast<I>(scaled) & (x >= Set(-126.0f)));
  }

  // Returns, per 32-bit lane, acc plus the sum over its four bytes of unsigned code times signed
  // weight. At most 32 steps with codes up to 3 are allowed before Widen: 16-bit sums of two
  // products each reach 24,576.
  static Acc ZeroAcc() { return Acc{}; }
  static Acc Dot(Acc acc, I codes, I weights) {
    const Acc code = reinterpret_cast<Acc>(codes), weight = reinterpret_cast<Acc>(weights);
    const Acc even = (code & 0xff) * ((weight << 8) >> 8);
    // codes are below 128, so there is no sign to lose
    const Acc odd = (code >> 8) * (weight >> 8);
    return acc + even + odd;
  }
  // Returns 256 * high + low.
  static I Widen(Acc high, Acc low) {
    const I upper = reinterpret_cast<I>(high), lower = reinterpret_cast<I>(low);
    return 256 * (((upper << 16) >> 16) + (upper >> 16)) + ((lower << 16) >> 16) + (lower >> 16);
  }
  static I Broadcast32(const void* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof(x));
    return SetI(x);
  }
  static I Broadcast64(const void* p) {
    int32_t x[2];
    std::memcpy(x, p, sizeof(x));
    return I{x[0], x[1], x[0], x[1]};
  }
  // Stores the low bytes of every four lanes of a, then of b: kLanes * 2 bytes.
  static void StoreWeights(uint8_t* p, I a, I b) {
    for (int i = 0; i < 4; ++i) {
      p[i] = static_cast<uint8_t>(a[i]);
      p[4 + i] = static_cast<uint8_t>(b[i]);
    }
  }
  // Splits lanes of two halves: the lower one is the scale, the upper one the minimum.
  static void SplitHalves(I pairs, F* scale, F* minimum) {
    for (int i = 0; i < 4; ++i) {
      (*scale)[i] = Fp16ToFloat(static_cast<uint16_t>(pairs[i]));
      (*minimum)[i] = Fp16ToFloat(static_cast<uint16_t>(static_cast<uint32_t>(pairs[i]) >> 16));
    }
  }

  static Key LoadKey(const Bf16* p) { return LoadBf16(p); }
  // Returns the row in the form that the implementation multiplies with.
  static const QueryElement* QueryOf(const float* q, const Bf16*) { return q; }
  static F DotKey(F acc, Key key, const QueryElement* q) { return key * Load(q) + acc; }

  // Transposes the 64-bit units of 8 rows: out[unit][2 r + i] is 32-bit word i of unit `unit` of
  // row r, with 4 or 8 units per row. In values the bytes (b, e, half) of each 64 bits are first
  // ordered as (half, e, b), which pairs tokens (docs/kernels/cpu.md, "Panels").
  static void TransposeUnits(const uint8_t* rows, int units, TilePart part, uint32_t* out) {
    for (int r = 0; r < 8; ++r) {
      for (int unit = 0; unit < units; ++unit) {
        const uint8_t* in = rows + 8 * (units * r + unit);
        uint8_t bytes[8];
        for (int i = 0; i < 8; ++i) {
          const int half = i / 4, e = i / 2 % 2, b = i % 2;
          bytes[i] = part == TilePart::kValue ? in[4 * b + half + 2 * e] : in[i];
        }
        std::memcpy(out + 16 * unit + 2 * r, bytes, sizeof(bytes));
      }
    }
  }

 private:
  using U = uint32_t __attribute__((vector_size(16)));

  template <typename T>
  static T LoadAs(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static I SelectI(I mask, I a, I b) { return (mask & a) | (~mask & b); }
  static F Select(I mask, F a, F b) {
    return reinterpret_cast<F>(SelectI(mask, reinterpret_cast<I>(a), reinterpret_cast<I>(b)));
  }
};

}  // namespace crumb::kernels::portable
