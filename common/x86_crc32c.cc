// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/x86_crc32c.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

namespace crumb {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

// One crc32 instruction takes three cycles and one can start each cycle, so three streams of equal
// length run at once and their sums are joined at the end.
constexpr size_t kStreamBytes = 512;

// x^power modulo the polynomial, bit 31 being x^0.
constexpr uint32_t PowerOfX(int power) {
  uint32_t value = 0x80000000u;
  for (int i = 0; i < power; ++i) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
  return value;
}

// The carry-less product below stands for a * b * x and the crc32 instruction multiplies by x^32,
// so a shift over n bytes takes the factor x^(8n - 33).
constexpr uint32_t kShiftOne = PowerOfX(8 * kStreamBytes - 33);
constexpr uint32_t kShiftTwo = PowerOfX(16 * kStreamBytes - 33);

__attribute__((target("sse4.2,pclmul"))) inline uint64_t Load(const std::byte* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  asm("" : "+r"(word));  // loaded once: others may be writing there
  return word;
}

__attribute__((target("sse4.2,pclmul"))) inline uint64_t Shift(uint64_t crc, uint32_t factor) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(factor)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

// Sums `size` bytes and, when kCopy, writes each word it summed to `target`.
template <bool kCopy>
__attribute__((target("sse4.2,pclmul"))) uint32_t Crc32cX86(std::byte* target,
                                                            const std::byte* source, size_t size,
                                                            uint32_t initial) {
  uint64_t crc = ~initial;
  while (size >= 3 * kStreamBytes) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kStreamBytes; i += 8) {
      const uint64_t a = Load(source + i);
      const uint64_t b = Load(source + kStreamBytes + i);
      const uint64_t c = Load(source + 2 * kStreamBytes + i);
      crc = _mm_crc32_u64(crc, a);
      second = _mm_crc32_u64(second, b);
      third = _mm_crc32_u64(third, c);
      if constexpr (kCopy) {
        std::memcpy(target + i, &a, 8);
        std::memcpy(target + kStreamBytes + i, &b, 8);
        std::memcpy(target + 2 * kStreamBytes + i, &c, 8);
      }
    }
    crc = Shift(crc, kShiftTwo) ^ Shift(second, kShiftOne) ^ third;
    source += 3 * kStreamBytes;
    if constexpr (kCopy) target += 3 * kStreamBytes;
    size -= 3 * kStreamBytes;
  }
  for (; size >= 8; size -= 8, source += 8) {
    const uint64_t word = Load(source);
    crc = _mm_crc32_u64(crc, word);
    if constexpr (kCopy) {
      std::memcpy(target, &word, 8);
      target += 8;
    }
  }
  auto crc32 = static_cast<uint32_t>(crc);
  for (; size > 0; --size, ++source) {
    auto byte = static_cast<uint8_t>(*source);
    asm("" : "+r"(byte));
    crc32 = _mm_crc32_u8(crc32, byte);
    if constexpr (kCopy) *target++ = static_cast<std::byte>(byte);
  }
  return ~crc32;
}

#define CRUMB_AVX512_CRC __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))

constexpr size_t kVectorBytes = 64;
constexpr size_t kBlockBytes = 4 * kVectorBytes;

// Multipliers that move 16 bytes on by `bits`: the first 8 bytes, which are the higher powers, are
// multiplied by x^(bits + 64) and the rest by x^bits. A product stands for a * b * x.
template <int kBits>
CRUMB_AVX512_CRC inline __m128i Factors() {
  return _mm_set_epi64x(static_cast<int64_t>(uint64_t{PowerOfX(kBits - 1)} << 32),
                        static_cast<int64_t>(uint64_t{PowerOfX(kBits + 63)} << 32));
}
template <int kBits>
CRUMB_AVX512_CRC inline __m512i WideFactors() {
  return _mm512_broadcast_i32x4(Factors<kBits>());
}

CRUMB_AVX512_CRC inline __m512i Fold(__m512i sum, __m512i factors, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, factors, 0x00),
                                   _mm512_clmulepi64_epi128(sum, factors, 0x11), next, 0x96);
}

CRUMB_AVX512_CRC inline __m128i Fold(__m128i sum, __m128i factors, __m128i next) {
  return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(sum, factors, 0x00),
                                           _mm_clmulepi64_si128(sum, factors, 0x11)));
}

// Loads 64 bytes, once: the compiler may not come back for them. Stores them when kCopy.
template <bool kCopy>
CRUMB_AVX512_CRC inline __m512i Take(std::byte* target, const std::byte* source, size_t at) {
  __m512i bytes = _mm512_loadu_si512(source + at);
  asm("" : "+v"(bytes));
  if constexpr (kCopy) _mm512_storeu_si512(target + at, bytes);
  return bytes;
}

// The sum of 64 bytes that everything before was folded into.
CRUMB_AVX512_CRC inline uint32_t Reduce(__m512i sum) {
  const __m128i factors = Factors<128>();
  __m128i last = _mm512_castsi512_si128(sum);
  last = Fold(last, factors, _mm512_extracti32x4_epi32(sum, 1));
  last = Fold(last, factors, _mm512_extracti32x4_epi32(sum, 2));
  last = Fold(last, factors, _mm512_extracti32x4_epi32(sum, 3));
  const uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_extract_epi64(last, 0)));
  return static_cast<uint32_t>(
      _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(last, 1))));
}

// Four sums of every fourth 64 bytes at once: a product takes several cycles, one can start in
// each.
template <bool kCopy>
CRUMB_AVX512_CRC uint32_t Crc32cWide(std::byte* target, const std::byte* source, size_t size,
                                     uint32_t initial) {
  if (size < kBlockBytes) return Crc32cX86<kCopy>(target, source, size, initial);
  const __m512i by_block = WideFactors<8 * kBlockBytes>();
  const __m512i by_vector = WideFactors<8 * kVectorBytes>();
  const __m512i begin = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~initial)));
  __m512i a = _mm512_xor_si512(begin, Take<kCopy>(target, source, 0));
  __m512i b = Take<kCopy>(target, source, kVectorBytes);
  __m512i c = Take<kCopy>(target, source, 2 * kVectorBytes);
  __m512i d = Take<kCopy>(target, source, 3 * kVectorBytes);
  size_t at = kBlockBytes;
  for (; at + kBlockBytes <= size; at += kBlockBytes) {
    a = Fold(a, by_block, Take<kCopy>(target, source, at));
    b = Fold(b, by_block, Take<kCopy>(target, source, at + kVectorBytes));
    c = Fold(c, by_block, Take<kCopy>(target, source, at + 2 * kVectorBytes));
    d = Fold(d, by_block, Take<kCopy>(target, source, at + 3 * kVectorBytes));
  }
  d = Fold(Fold(Fold(a, by_vector, b), by_vector, c), by_vector, d);
  for (; at + kVectorBytes <= size; at += kVectorBytes) {
    d = Fold(d, by_vector, Take<kCopy>(target, source, at));
  }
  const uint32_t crc = ~Reduce(d);
  std::byte* const rest = kCopy ? target + at : nullptr;
  return Crc32cX86<kCopy>(rest, source + at, size - at, crc);
}

template <uint32_t (*kCopying)(std::byte*, const std::byte*, size_t, uint32_t),
          uint32_t (*kSumming)(std::byte*, const std::byte*, size_t, uint32_t)>
uint32_t CopyOrNot(std::byte* target, const std::byte* source, size_t size, uint32_t crc) {
  return target == nullptr ? kSumming(target, source, size, crc)
                           : kCopying(target, source, size, crc);
}

}  // namespace

X86Crc32c Sse42Crc32c() {
  const bool have = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
  return have ? &CopyOrNot<Crc32cX86<true>, Crc32cX86<false>> : nullptr;
}

X86Crc32c Avx512Crc32c() {
  const bool have = Sse42Crc32c() != nullptr && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
  return have ? &CopyOrNot<Crc32cWide<true>, Crc32cWide<false>> : nullptr;
}

}  // namespace crumb

#else

namespace crumb {

X86Crc32c Sse42Crc32c() { return nullptr; }
X86Crc32c Avx512Crc32c() { return nullptr; }

}  // namespace crumb

#endif
