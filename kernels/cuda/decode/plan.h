// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/cluster_layout.h"
#include "kernels/cuda/decode/decode_attention.h"

// The plan PlanDecode leaves in device memory, and the workspace of DecodeAttention. Inside the
// CUDA back end only.
namespace crumb::kernels::cuda {

inline constexpr int kChunkTokens = 16;           // BF16 rows a warp takes at a time
inline constexpr int kInvariantSplitPages = 128;  // split size of DecodeShape::batch_invariant
inline constexpr int kUnitsPerBlockMin = 16;      // a group is given at least this much work
inline constexpr int kStagesMax = 4;              // tiles a warp has in shared memory
inline constexpr int kPassRows = 16;              // query rows rotated, or turned back, together
inline constexpr int kGroupWarps = 4;             // warps of a group where a block has several

enum SegmentKind : int32_t { kSegmentInt2 = 0, kSegmentBf16 = 1, kSegmentNone = 2 };

// A run of pages, or of BF16 chunks, of one (sequence, KV head): what one group of warps sums up
// without interruption. Its partial result has the segment's index.
struct alignas(16) Segment {
  int32_t sequence;
  int32_t head;
  int32_t begin;  // first page, or first chunk (sink chunks, then recent chunks)
  int32_t end;
  int32_t kind;
  int32_t pair;        // head * batch + sequence
  int32_t int2_first;  // the pair's segments, in split order
  int32_t int2_count;
  int32_t bf16_first;
  int32_t bf16_count;
  int32_t pad[2];
};
static_assert(sizeof(Segment) == 48);

// What one group of warps does: segments [begin, end). The first one is here too, so that a group
// reads one line before it starts to load. A block is one group of all its warps, or, where there
// are many segments, several groups of kGroupWarps; then its groups' shares follow each other.
struct alignas(128) GroupShare {
  Segment first;
  int32_t begin;
  int32_t end;
  int32_t block_begin;  // segments of the whole block
  int32_t block_end;
  int32_t block_head;  // of its first segment
  int32_t groups;      // of the block: 1 or DecodeLaunch::groups_max()
};
static_assert(sizeof(GroupShare) == 128);

// What one cluster does where the plan decides between both forms (ClusterLaunch::by_plan).
struct alignas(16) ClusterShare {
  int32_t parts;  // clusters of its pair; 0: it has none; kNoClusters: its blocks have GroupShares
  int32_t part;   // the pair's clusters follow each other
  int32_t sequence;
  int32_t head;
};
inline constexpr int kNoClusters = -1;

// Where the parts of the plan lie.
struct PlanView {
  GroupShare* shares;       // [blocks, groups_max]; with one group to a block, all alike
  int32_t* boundary;        // [blocks * groups_max + 1] position where a share begins
  int32_t* cost_before;     // [batch + 1] cost of earlier sequences, one head
  int32_t* segment_before;  // [batch + 1] segments, or items, of earlier sequences, one head
  Segment* segments;        // [SegmentsMax]
  ClusterShare* clusters;   // [blocks / blocks of a cluster], or null
};

// Where the parts of the workspace lie. With clusters: arrivals [pairs, blocks] and packets, the
// others null; where the plan decides, all of them.
struct WorkspaceView {
  int32_t* arrivals;     // [kv_heads * batch] segments done; zero between calls
  uint32_t* q_fragment;  // [segments, FragmentWords] bytes of q R_K
  float* row_constant;   // [segments, rows, 1 + groups] raw score to log2 units, sums of q'
  float* row_state;      // [segments, rows, 2] maximum (log2 units) and softmax sum
  float* partial;        // [segments, rows, head_dim] values, scaled to the maximum
  // [clusters, blocks, rows, slice / 2] what blocks of a pair's clusters leave for the last one;
  // zero between calls
  uint64_t (*packets)[2];
};

// How the attention kernel is launched on a device.
struct DecodeLaunch {
  int columns = 1;  // of one launch; a call of more has several, one after another
  int blocks = 0;
  int warps = 0;
  int stages = 0;        // tiles a warp has in shared memory
  bool pair = false;     // a query row of the last column tile takes two columns, hi and lo halves
  int column_tiles = 1;  // of 8 columns
  size_t slot_bytes = 0;
  size_t shared_bytes = 0;
  ClusterLaunch cluster;  // the form with clusters, where it is taken

  int rows() const { return 8 * column_tiles - (pair ? 4 : 0); }
  int groups_max() const { return warps / kGroupWarps; }
  // Words of a segment's rotated query.
  size_t FragmentWords(const TileShape& tile) const {
    const int split = tile.group_size == 32 ? 2 : 1;
    return static_cast<size_t>(2 * column_tiles - (pair ? 1 : 0)) * tile.head_dim / 32 * split * 64;
  }
};

// Warps of a block, where shared memory has room for them: as many as registers allow.
constexpr int WarpsFor(int head_dim, int column_tiles) {
  return column_tiles * head_dim > 128 ? 8 : 12;
}

// Columns of a call, and of a launch: output and query of more would not fit the registers.
inline constexpr int kColumnsMax = 32;
constexpr int LaunchColumnsFor(const TileShape& tile, int columns) {
  const int columns_max = tile.head_dim == 128 && tile.group_size == 128 ? 16 : 8;
  const int launches = (columns + columns_max - 1) / columns_max;
  return (columns + launches - 1) / launches;
}

// On the current device, within complete limits. cudaErrorInvalidValue: sizes not supported.
cudaError_t LaunchOf(const DecodeShape& shape, DecodeForm form, const DeviceLimits& limits,
                     DecodeLaunch* launch);

int SegmentsMax(const DecodeShape& shape, const DecodeLaunch& launch);
// Sets the view's pointers from `base` (may be null) and returns the bytes.
size_t LayOutPlan(const DecodeShape& shape, const DecodeLaunch& launch, void* base, PlanView* view);
size_t LayOutWorkspace(const DecodeShape& shape, const DecodeLaunch& launch, void* base,
                       WorkspaceView* view);

}  // namespace crumb::kernels::cuda
