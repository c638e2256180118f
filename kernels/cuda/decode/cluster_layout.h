// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// How the cluster form of decode attention (decode_cluster.h) is launched. Inside the CUDA back end
// only.
namespace crumb::kernels::cuda {

inline constexpr int kClusterStages = 3;  // tiles a warp has in shared memory

// What the factors of the rotated query take where they come through shared memory: of a warp 16
// rows of R_K, of 64 channels, and 16 channels of each query row.
inline constexpr uint32_t kFactorStride = 4 * (64 + 4);
inline constexpr uint32_t kQueryPiece = 32;
// Whether they do, in a plain kernel: with 5 to 8 columns there is no room beside the rings.
constexpr bool StagesFactors(int column_tiles, bool pair) { return column_tiles > 1 || pair; }
constexpr uint32_t FactorBytes(int rows) { return 16 * kFactorStride + kQueryPiece * rows; }

// Where the parts of a block's shared memory lie, in bytes. `blocks`: of a cluster. Arrays whose
// comment says "from all" are written by the cluster's other blocks too.
struct ClusterLayout {
  uint32_t barriers;    // of the rings, then 3 of the exchanges
  uint32_t query;       // from all: rotated query, [rows] rows of dim + 4 floats
  uint32_t products;    // [dim / 16, rows, slice] parts of the block's slice of it
  uint32_t rotation;    // [slice] rows of R_V of dim + 4 floats; products are in the same place
                        // before, or, where these are staged, their factors: [dim / 16] FactorBytes
  uint32_t fragment;    // RotatedQuery of the pair
  uint32_t constant;    //
  uint32_t warp_state;  // [warps, rows] maximum and sum
  uint32_t partial;     // from all: [blocks, rows, 2, slice] sums over history and windows
  uint32_t block_state;  // from all: [blocks, rows, 4] maximum, sum, history's sum
  uint32_t merged;       // from all: the history's part, [rows] rows of dim + 4 floats
  uint32_t plain;        // [rows, slice] the windows' part
  uint32_t row_state;    // [rows, 2] maximum and sum
  uint32_t arrived;      // parts of the pair that had come when this one did
  uint32_t bytes;        // of all

  ClusterLayout() = default;
  // The rings come first: kClusterStages slots a warp.
  constexpr ClusterLayout(int warps, uint32_t slot_bytes, int dim, int rows, int fragment_words,
                          int blocks, bool staged)
      : barriers(warps * kClusterStages * slot_bytes),
        query(barriers + Round(8 * (warps * kClusterStages + 3))),
        products(query + 4 * rows * (dim + 4)),
        rotation(products + (staged ? 4 * dim / 16 * rows * (dim / blocks) : 0)),
        fragment(Most(products + 4 * dim / 16 * rows * (dim / blocks),
                      rotation + Most(4 * (dim / blocks) * (dim + 4),
                                      staged ? dim / 16 * FactorBytes(rows) : 0))),
        constant(fragment + 4 * fragment_words),
        warp_state(constant + 8 * rows),
        partial(warp_state + 8 * warps * rows),
        block_state(partial + 4 * rows * 2 * dim),
        merged(block_state + 16 * blocks * rows),
        plain(merged + 4 * rows * (dim + 4)),
        row_state(plain + 4 * rows * (dim / blocks)),
        arrived(row_state + 8 * rows),
        bytes(arrived + 16) {}

 private:
  static constexpr uint32_t Round(uint32_t x) { return (x + 15) / 16 * 16; }
  static constexpr uint32_t Most(uint32_t x, uint32_t y) { return x > y ? x : y; }
};

struct ClusterLaunch {
  int blocks_log2 = -1;  // blocks of a cluster; -1: the shape has no clusters
  int slice_log2 = 0;    // channels of a block
  int parts = 1;         // clusters that share a sequence and KV head, unless by_plan
  // The plan decides from the lengths: clusters, as many for each pair as its bytes ask for, or its
  // equal pieces for each block.
  bool by_plan = false;
  ClusterLayout layout;

  // Whatever the lengths; there is no plan.
  bool taken() const { return blocks_log2 >= 0 && !by_plan; }
  int blocks() const { return 1 << blocks_log2; }
};

}  // namespace crumb::kernels::cuda
