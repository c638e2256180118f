// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"

// CRC-32C on the tensor cores.
//
// A CRC is linear in the message's bits over the field of two elements, so it is the product of the
// bits with a matrix of constants. A one-bit MMA (mma.m16n8k256 with .and.popc) counts `data and
// constant`, and the parity of a count is one bit of the checksum. A warp processes units of 512
// bytes, 16 bytes per lane (docs/kernels/evict.md, "Checksums").
//
// The raw checksum of a message is its CRC with initial and final value 0. Raw checksums are
// linear: that of a concatenation is the XOR of its parts' after each has been multiplied by a
// power of x, and leading zeros do not change it. The CRC-32C proper is the raw checksum XOR
// ChecksumOfZeros.
//
// A polynomial of degree below 32 is a 32-bit word whose bit 31 is the factor of x^0.
namespace crumb::kernels::cuda::crc {

inline constexpr int kUnitBytes = 512;

inline constexpr uint32_t kPolynomial = 0x82F63B78;

constexpr uint32_t TimesX(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0u); }

constexpr uint32_t Times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 0; i < 32; ++i) {
    if ((b >> (31 - i) & 1) != 0) product ^= a;
    a = TimesX(a);
  }
  return product;
}

// Returns x^power modulo the CRC's polynomial.
constexpr uint32_t PowerOfX(uint64_t power) {
  uint32_t result = 0x80000000u, factor = 0x40000000u;
  for (; power != 0; power >>= 1) {
    if ((power & 1) != 0) result = Times(result, factor);
    factor = Times(factor, factor);
  }
  return result;
}

// Returns the CRC-32C of a message of `bytes` zeros: CRC-32C(message) is RawChecksum(message) XOR
// this.
constexpr uint32_t ChecksumOfZeros(size_t bytes) {
  return ~Times(0xffffffffu, PowerOfX(8 * static_cast<uint64_t>(bytes)));
}

// The constants of the bit MMA. Words 0 and 1 of lane 4 r + c are data of row r of the MMA, words 2
// and 3 of row r + 8. Columns[l][2 m + w] is lane l's constant of word w (and of word w + 2, for
// the lower rows) for the output bits 8 m to 8 m + 7 of a unit that is followed by `bytes_after`
// bytes.
struct Columns {
  uint32_t word[32][8];
};
constexpr Columns MakeColumns(int bytes_after) {
  Columns k{};
  for (int c = 0; c < 4; ++c) {
    for (int w = 0; w < 2; ++w) {
      // Bit 31 is the last bit of the word and has the lowest power.
      uint32_t power = PowerOfX(8 * bytes_after + 32 + 416 - 128 * c - 32 * w);
      for (int bit = 31; bit >= 0; --bit) {
        for (int n = 0; n < 32; ++n) {
          k.word[4 * (n % 8) + c][2 * (n / 8) + w] |= (power >> n & 1) << bit;
        }
        power = TimesX(power);
      }
    }
  }
  return k;
}

// Rows[l][8 h + 2 m + e] is the contribution of output bit 8 m + 2 c + e of row r + 8 h to the raw
// checksum.
struct Rows {
  uint32_t word[32][16];
};
constexpr Rows MakeRows() {
  Rows k{};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 16; ++i) {
      const int bit = i % 8 / 2 * 8 + 2 * (lane % 4) + i % 2;
      k.word[lane][i] = PowerOfX(31 - bit + 512 * (7 - lane / 4) + 64 * (1 - i / 8));
    }
  }
  return k;
}

#ifdef __CUDACC__

static __device__ const Columns kLastUnit = MakeColumns(0);
static __device__ const Rows kRows = MakeRows();

// The raw checksum of a message's units, accumulated as counts of one bits. All lanes of a warp
// make the same calls.
class RawChecksum {
 public:
  __device__ __forceinline__ RawChecksum() {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) counts_[m][i] = 0;
    }
  }

  // Adds a unit. `words` are bytes 16 lane to 16 lane + 15 of the unit; `first` and `second` are
  // this lane's 8 constants (Columns).
  __device__ __forceinline__ void Add(uint4 words, uint4 first, uint4 second) {
    const uint32_t a[4] = {words.x, words.z, words.y, words.w};
    ptx::MmaBits(counts_[0], a, first.x, first.y);
    ptx::MmaBits(counts_[1], a, first.z, first.w);
    ptx::MmaBits(counts_[2], a, second.x, second.y);
    ptx::MmaBits(counts_[3], a, second.z, second.w);
  }

  // Returns the raw checksum in every lane. `rows` are this lane's constants (Rows), kStep elements
  // apart.
  template <int kStep = 1>
  __device__ __forceinline__ uint32_t Result(const uint4* rows) const {
    uint32_t sum = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 factor = rows[(2 * h + half) * kStep];
        sum ^= factor.x & Parity(counts_[2 * half][2 * h]);
        sum ^= factor.y & Parity(counts_[2 * half][2 * h + 1]);
        sum ^= factor.z & Parity(counts_[2 * half + 1][2 * h]);
        sum ^= factor.w & Parity(counts_[2 * half + 1][2 * h + 1]);
      }
    }
    return __reduce_xor_sync(~0u, sum);
  }

 private:
  // Returns a word of ones if the count is odd, else 0.
  static __device__ __forceinline__ uint32_t Parity(int count) {
    uint32_t parity;
    asm("bfe.s32 %0, %1, 0, 1;" : "=r"(parity) : "r"(count));
    return parity;
  }

  int counts_[4][4];
};

// Returns the raw checksum of a message of one unit.
__device__ __forceinline__ uint32_t RawChecksumOfUnit(uint4 words) {
  const int lane = threadIdx.x % 32;
  const uint4* columns = reinterpret_cast<const uint4*>(kLastUnit.word[lane]);
  RawChecksum sum;
  sum.Add(words, __ldg(columns), __ldg(columns + 1));
  return sum.Result(reinterpret_cast<const uint4*>(kRows.word[lane]));
}

// Multiplies a raw checksum, which all lanes hold, by a polynomial: each lane holds
// LaneFactor(polynomial), and Multiply sums their contributions over the warp.
__device__ __forceinline__ uint32_t LaneFactor(uint32_t polynomial) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 31 - lane; ++i) {
    polynomial = (polynomial >> 1) ^ (kPolynomial & -(polynomial & 1));
  }
  return polynomial;
}
__device__ __forceinline__ uint32_t Multiply(uint32_t sum, uint32_t lane_factor) {
  const int lane = threadIdx.x % 32;
  return __reduce_xor_sync(~0u, lane_factor & -(sum >> lane & 1));
}

#endif  // __CUDACC__

}  // namespace crumb::kernels::cuda::crc
