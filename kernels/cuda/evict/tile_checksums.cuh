// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/crc32c.cuh"
#include "kernels/cuda/evict/quantize_rows.cuh"

// The contribution of a warp's 16 rows of codes and metadata to the CRC-32C of their tile (layout:
// docs/formats/page-tile.md). Constants contain each unit's place in the tile, so that all units
// accumulate in the same counts.
namespace crumb::kernels::cuda {

inline constexpr int kWindowTokens = 64;
inline constexpr int kWarpRows = 16;  // a 16-token group of the tile
inline constexpr int kWarpgroupWarps = kWindowTokens / kWarpRows;

// Units of 512 bytes in a token group's codes, and in all metadata of K or of V.
template <class T>
inline constexpr int kCodeUnits = T::kDim == 256 ? 2 : 1;
template <class T>
inline constexpr int kMetaUnits = (T::kGroups + 1) / 2;

// Constants of K or of V.
template <class T>
struct ChecksumColumns {
  crc::Columns codes[kWarpgroupWarps][kCodeUnits<T>];  // [token group]
  crc::Columns meta[kMetaUnits<T>];
};
template <class T>
constexpr ChecksumColumns<T> MakeChecksumColumns(bool value) {
  constexpr int kGroupBytes = 4 * T::kDim, kCodes = kWarpgroupWarps * kGroupBytes;
  constexpr int kMeta = 4 * kWindowTokens * T::kGroups, kTile = 2 * (kCodes + kMeta);
  ChecksumColumns<T> columns{};
  for (int group = 0; group < kWarpgroupWarps; ++group) {
    const int end = (value ? kCodes : 0) + (group + 1) * kGroupBytes;
    for (int unit = 0; unit < kCodeUnits<T>; ++unit) {
      const int after = (kCodeUnits<T> - 1 - unit) * crc::kUnitBytes;
      columns.codes[group][unit] = crc::MakeColumns(kTile - end + after);
    }
  }
  for (int unit = 0; unit < kMetaUnits<T>; ++unit) {
    const int after = (kMetaUnits<T> - 1 - unit) * crc::kUnitBytes;
    columns.meta[unit] = crc::MakeColumns((value ? 0 : kMeta) + after);
  }
  return columns;
}
template <class T>
static __device__ const ChecksumColumns<T> kChecksumColumns[2] = {MakeChecksumColumns<T>(false),
                                                                  MakeChecksumColumns<T>(true)};

// The constants of a block's matrix in shared memory, lanes' words side by side.
template <class T>
class MatrixChecksums {
 public:
  // Loads the constants. All threads of the block call it.
  __device__ __forceinline__ void Load(bool value) {
    const auto* from = reinterpret_cast<const uint4*>(&kChecksumColumns<T>[value]);
    for (int i = threadIdx.x; i < kUnits * 64; i += blockDim.x) {
      columns_[i / 64][i / 32 % 2][i % 32] = __ldg(from + i / 64 * 64 + i % 32 * 2 + i / 32 % 2);
    }
    const auto* rows = reinterpret_cast<const uint4*>(&crc::kRows);
    for (int i = threadIdx.x; i < 128; i += blockDim.x) {
      rows_[i / 32][i % 32] = __ldg(rows + i % 32 * 4 + i / 32);
    }
  }

  // Returns the contribution of a warp's bytes to the tile's raw checksum. `group` is the warp's
  // token group, `out` the words that the lane stores, `meta` the metadata of the lane's own row.
  __device__ __forceinline__ uint32_t PartOf(int group, const uint32_t (&out)[T::kTiles / 4],
                                             const uint32_t (&meta)[T::kGroups]) const {
    const int lane = threadIdx.x % 32;
    crc::RawChecksum sum;
#pragma unroll
    for (int i = 0; i < kCodeUnits<T>; ++i) {
      uint4 words;
      if constexpr (T::kDim == 64) {
        // The 256 bytes, 8 per lane, fill the upper half of a unit.
        const int from = lane % 16 * 2;
        words = make_uint4(__shfl_sync(~0u, out[0], from), __shfl_sync(~0u, out[1], from),
                           __shfl_sync(~0u, out[0], from + 1), __shfl_sync(~0u, out[1], from + 1));
        if (lane < 16) words = make_uint4(0, 0, 0, 0);
      } else {
        words = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
      }
      Add(words, group * kCodeUnits<T> + i, &sum);
    }
    // This warp has 8 in every 32 of a group's 256 bytes of metadata.
    const int row = lane % 16 / 2;
    const bool mine = lane % 2 == group / 2, upper = group % 2 == 1;
#pragma unroll
    for (int i = 0; i < kMetaUnits<T>; ++i) {
      constexpr bool kWhole = T::kGroups > 1;  // two groups per unit, else only the upper half
      uint32_t word[2];
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        word[a] = __shfl_sync(~0u, meta[kWhole ? 2 * i + 1 : 0], 4 * row + a);
        const uint32_t lower = kWhole ? __shfl_sync(~0u, meta[2 * i], 4 * row + a) : 0u;
        if (lane < 16) word[a] = lower;
        if (!mine) word[a] = 0;
      }
      Add(make_uint4(upper ? 0 : word[0], upper ? 0 : word[1], upper ? word[0] : 0,
                     upper ? word[1] : 0),
          kWarpgroupWarps * kCodeUnits<T> + i, &sum);
    }
    return sum.Result<32>(&rows_[0][lane]);
  }

 private:
  static constexpr int kUnits = kWarpgroupWarps * kCodeUnits<T> + kMetaUnits<T>;

  __device__ __forceinline__ void Add(uint4 words, int unit, crc::RawChecksum* sum) const {
    const int lane = threadIdx.x % 32;
    sum->Add(words, columns_[unit][0][lane], columns_[unit][1][lane]);
  }

  uint4 columns_[kUnits][2][32];
  uint4 rows_[4][32];
};

}  // namespace crumb::kernels::cuda
