// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// Launch configuration and shared memory layout of the cluster schedule. Internal to the CUDA back
// end.
namespace crumb::kernels::cuda {

inline constexpr int kClusterStages = 3;  // tiles that each warp has in shared memory

// Shared memory of one warp for staged factors of q R_K: 16 rows of R_K of 64 channels, padded, and
// 16 channels of each query row.
inline constexpr uint32_t kFactorStride = 4 * (64 + 4);
inline constexpr uint32_t kQueryPiece = 32;
// Returns whether the fast path stages the factors through shared memory. With 5 to 8 query rows
// there is no room beside the rings.
constexpr bool StagesFactors(int query_tiles, bool interleaved) {
  return query_tiles > 1 || interleaved;
}
constexpr uint32_t FactorBytes(int rows) { return 16 * kFactorStride + kQueryPiece * rows; }

// Offsets of the arrays in a block's shared memory, in bytes. `blocks` is the size of a cluster.
// Arrays marked "written from all" are also written by the cluster's other blocks.
struct ClusterLayout {
  uint32_t barriers;     // mbarriers: of the rings, then 3 of the exchanges
  uint32_t query;        // written from all: rotated query, [rows] rows of dim + 4 floats
  uint32_t query_parts;  // [dim / 16, rows, slice] partial sums of the block's slice of it
  // [slice] rows of R_V of dim + 4 floats, in the place of query_parts after these are summed;
  // staged factors of the query, [dim / 16] FactorBytes, are in this place before
  uint32_t rotation;
  uint32_t fragment;    // RotatedQuery::fragment
  uint32_t constant;    // RotatedQuery::constant
  uint32_t warp_state;  // [warps, rows] running max and sum
  uint32_t
      partial;  // written from all: [blocks, rows, 2, slice] sums over history and over windows
  // written from all: [blocks, rows, 4] running max, sum, the history's part of the sum
  uint32_t block_state;
  uint32_t merged;  // written from all: merged output of the history, [rows] rows of dim + 4 floats
  uint32_t bf16_part;  // [rows, slice] merged output of the windows
  uint32_t row_state;  // [rows, 2] running max and sum
  uint32_t arrived;    // number of the problem's clusters that arrived before this one
  uint32_t bytes;      // total

  ClusterLayout() = default;
  // The rings lie at offset 0: kClusterStages slots per warp.
  constexpr ClusterLayout(int warps, uint32_t slot_bytes, int dim, int rows, int fragment_words,
                          int blocks, bool staged)
      : barriers(warps * kClusterStages * slot_bytes),
        query(barriers + Round(8 * (warps * kClusterStages + 3))),
        query_parts(query + 4 * rows * (dim + 4)),
        rotation(query_parts + (staged ? 4 * dim / 16 * rows * (dim / blocks) : 0)),
        fragment(Most(query_parts + 4 * dim / 16 * rows * (dim / blocks),
                      rotation + Most(4 * (dim / blocks) * (dim + 4),
                                      staged ? dim / 16 * FactorBytes(rows) : 0))),
        constant(fragment + 4 * fragment_words),
        warp_state(constant + 8 * rows),
        partial(warp_state + 8 * warps * rows),
        block_state(partial + 4 * rows * 2 * dim),
        merged(block_state + 16 * blocks * rows),
        bf16_part(merged + 4 * rows * (dim + 4)),
        row_state(bf16_part + 4 * rows * (dim / blocks)),
        arrived(row_state + 8 * rows),
        bytes(arrived + 16) {}

 private:
  static constexpr uint32_t Round(uint32_t x) { return (x + 15) / 16 * 16; }
  static constexpr uint32_t Most(uint32_t x, uint32_t y) { return x > y ? x : y; }
};

struct ClusterLaunch {
  int blocks_log2 = -1;  // blocks per cluster; -1: the shape has no clusters
  int slice_log2 = 0;    // channels per block
  int parts = 1;         // clusters of a (sequence, KV head), unless by_plan
  // True: the plan decides by the lengths between clusters, whose number follows each problem's
  // bytes, and the planned schedule.
  bool by_plan = false;
  ClusterLayout layout;

  // Returns whether clusters are used whatever the lengths, without a plan.
  bool taken() const { return blocks_log2 >= 0 && !by_plan; }
  int blocks() const { return 1 << blocks_log2; }
};

}  // namespace crumb::kernels::cuda
