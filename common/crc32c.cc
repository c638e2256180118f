// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crumb {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
    table[i] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

#if defined(__x86_64__)

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
    const auto byte = static_cast<uint8_t>(*source);
    crc32 = _mm_crc32_u8(crc32, byte);
    if constexpr (kCopy) *target++ = static_cast<std::byte>(byte);
  }
  return ~crc32;
}

bool HaveInstruction() {
  static const bool have = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
  return have;
}

#endif

}  // namespace

uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t crc) {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint32_t>(byte)) & 0xFF];
  }
  return ~crc;
}

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  if (HaveInstruction()) return Crc32cX86<false>(nullptr, bytes.data(), bytes.size(), crc);
#endif
  return Crc32cPortable(bytes, crc);
}

uint32_t CopyCrc32c(std::byte* target, std::span<const std::byte> source) {
#if defined(__x86_64__)
  if (HaveInstruction()) return Crc32cX86<true>(target, source.data(), source.size(), 0);
#endif
  std::memcpy(target, source.data(), source.size());
  return Crc32cPortable({target, source.size()});
}

}  // namespace crumb
