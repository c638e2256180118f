// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/cluster_ptx.cuh"
#include "kernels/cuda/decode_cluster.h"
#include "kernels/cuda/decode_finish.cuh"
#include "kernels/cuda/decode_rotate.cuh"

// What the blocks of a cluster do together (decode_cluster.h). Block `rank` of a cluster owns a
// slice of the channels: of q', and of the output.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Which share of which pair a block has.
struct ClusterPlace {
  int rank;    // in the cluster
  int blocks;  // of the cluster
  int part;    // of the pair's clusters
  int parts;
  int sequence;
  int head;
  int pair;        // sequence and head as one number
  int first;       // of the pair's clusters, of all
  int slice_log2;  // channels of a block

  // By the grid.
  __device__ __forceinline__ explicit ClusterPlace(const DecodeKernelParams& k)
      : ClusterPlace(k, {k.launch.cluster.parts,
                         static_cast<int>(blockIdx.x) >> k.launch.cluster.blocks_log2,
                         static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)}) {
    first = pair * parts;
  }
  // By the plan.
  __device__ __forceinline__ ClusterPlace(const DecodeKernelParams& k, const ClusterShare& share)
      : rank(static_cast<int>(blockIdx.x) & ((1 << k.launch.cluster.blocks_log2) - 1)),
        blocks(1 << k.launch.cluster.blocks_log2),
        part(share.part),
        parts(share.parts),
        sequence(share.sequence),
        head(share.head),
        pair(share.sequence * k.p.shape.kv_heads + share.head),
        first((static_cast<int>(blockIdx.x) >> k.launch.cluster.blocks_log2) - share.part),
        slice_log2(k.launch.cluster.slice_log2) {}
  __device__ __forceinline__ int slice() const { return 1 << slice_log2; }
  // Of the pair's blocks.
  __device__ __forceinline__ int index() const { return part * blocks + rank; }
  __device__ __forceinline__ int count() const { return parts * blocks; }
};

// What blocks wait for: each once in a launch.
enum ClusterExchange { kRotatedSlices = 0, kPartialSums = 1, kMergedSlices = 2 };

// This block's shared memory, and how others reach theirs.
template <class T>
struct ClusterMemory {
  static constexpr int kWarps = T::kThreadsMax / 32;
  // Floats from one row of a warp's sums to the next; bank conflicts.
  static constexpr int kSumStride = T::kDim + 8;
  static_assert(4 * T::kRows * kSumStride <= kClusterStages * T::kTileBytes);

  char* shared;
  const ClusterLayout& at;

  __device__ __forceinline__ ClusterMemory(char* base, const DecodeKernelParams& k)
      : shared(base), at(k.launch.cluster.layout) {}
  __device__ __forceinline__ float* Floats(uint32_t offset) const {
    return reinterpret_cast<float*>(shared + offset);
  }
  __device__ __forceinline__ uint32_t Address(uint32_t offset) const {
    return ptx::SharedAddress(shared) + offset;
  }
  __device__ __forceinline__ uint32_t Barrier(ClusterExchange exchange) const {
    return Address(at.barriers) + 8 * (kWarps * kClusterStages + exchange);
  }
  __device__ __forceinline__ uint32_t Slots(int warp) const {
    return Address(warp * kClusterStages * T::kTileBytes);
  }

  __device__ __forceinline__ RotatedQuery Rotated() const {
    return {reinterpret_cast<const uint32_t*>(shared + at.fragment), Floats(at.constant)};
  }

  // One thread, before any block stores anything.
  __device__ __forceinline__ void InitExchanges(int blocks) const {
    const uint32_t bytes[3] = {4u * T::kRows * T::kDim,
                               8u * T::kRows * T::kDim + 16u * T::kRows * blocks,
                               4u * T::kRows * T::kDim};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      ptx::InitBarrier(Barrier(static_cast<ClusterExchange>(i)), 1);
    }
    ptx::FenceBarrierInit();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      ptx::ArriveExpecting(Barrier(static_cast<ClusterExchange>(i)), bytes[i]);
    }
  }
};

// The block's slice of q' = q R_K: 16 input channels and 8 output channels at a time, a warp each,
// both factors as in QueryRotation.
template <class T>
class SliceRotation {
 public:
  __device__ __forceinline__ SliceRotation(const DecodeKernelParams& k, const ClusterPlace& place)
      : k_(k), place_(place), rows_(k), half_(k.p.row_type == RowType::kFp16) {}

  // Ask for all that the warp multiplies by: what is asked for behind tiles comes behind them.
  __device__ __forceinline__ void AskMatrix() {
    if (threadIdx.x >= 32 * T::kSteps) return;
    if (place_.slice() >= 32) {
      LoadQuads();
    } else {
      LoadSingles();
    }
  }
  __device__ __forceinline__ void AskQuery() {
    if (threadIdx.x < 32 * T::kSteps) LoadQuery();
  }

  __device__ __forceinline__ void Multiply(float* products) const {
    if (threadIdx.x >= 32 * T::kSteps) return;
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[0][i] = query_[i];
      if (half_) {
        ptx::SplitBf16(ptx::LowHalf(query_[i]), ptx::HighHalf(query_[i]), &a[0][i], &a[1][i]);
      }
    }
    const int row = threadIdx.x % 32 / 4;
    float* to = products + ((threadIdx.x / 32 * T::kRows + row) << place_.slice_log2);
#pragma unroll
    for (int quad = 0; quad < kQuadsMax; ++quad) {
      if (32 * quad >= place_.slice()) break;
      float acc[4][4] = {};
      // Without quads the slice has one or two tiles.
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < 2 || place_.slice() >= 32) MultiplyTile(a, matrix_[quad][e], acc[e]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row + 8 * i < T::kRows) Keep(acc, i, quad, to + (8 * i << place_.slice_log2));
      }
    }
  }

  // Adds up the slice and stores it to all blocks. By the block's first `warps`.
  __device__ __forceinline__ void Send(const ClusterMemory<T>& memory, int warps) const {
    const int quads_log2 = place_.slice_log2 - 2;
    const float* products = memory.Floats(memory.at.products);
    for (int i = threadIdx.x; i < T::kRows << quads_log2; i += 32 * warps) {
      const int row = i >> quads_log2, channel = 4 * (i & ((1 << quads_log2) - 1));
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) {
        const float4 x = *reinterpret_cast<const float4*>(
            products + ((step * T::kRows + row) << place_.slice_log2) + channel);
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      const int at = row * kStageStride<T::kDim> + (place_.rank << place_.slice_log2) + channel;
      const uint32_t to = memory.Address(memory.at.query + 4 * at);
#pragma unroll 1
      for (int block = 0; block < place_.blocks; ++block) {
        ptx::StoreRemote(ptx::MapShared(to, block), sum,
                         ptx::MapShared(memory.Barrier(kRotatedSlices), block));
      }
    }
  }

 private:
  static constexpr int kQuadsMax = T::kDim / 64;  // of 32 channels, in a slice
  static_assert(T::kSteps <= ClusterMemory<T>::kWarps);

  // Element i of a lane's operand: row 16 step + 2 c + {0, 1, 8, 9} of R_K; the identity where
  // there is none.
  __device__ static __forceinline__ int MatrixRow(int i) {
    return threadIdx.x / 32 * 16 + threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8;
  }
  // Tile e of a quad has channels 32 quad + 4 n + e, n the column of the product.
  __device__ __forceinline__ void LoadQuads() {
    const int column = (place_.rank << place_.slice_log2) + threadIdx.x % 32 / 4 * 4;
    const float* matrix = k_.p.rotation_k + static_cast<int64_t>(place_.head) * T::kDim * T::kDim +
                          MatrixRow(0) * T::kDim + column;
#pragma unroll
    for (int quad = 0; quad < kQuadsMax; ++quad) {
      if (32 * quad >= place_.slice()) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[4];
        if (k_.p.rotation_k != nullptr) {
          const float4 all =
              *reinterpret_cast<const float4*>(matrix + (i % 2 + i / 2 * 8) * T::kDim + 32 * quad);
          x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
        } else {
          for (int e = 0; e < 4; ++e) {
            x[e] = MatrixRow(i) == column + 32 * quad + e ? 1.0f : 0.0f;
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) matrix_[quad][e][i] = x[e];
      }
    }
  }
  // Tile e has channels 8 e + n.
  __device__ __forceinline__ void LoadSingles() {
    const int column = (place_.rank << place_.slice_log2) + threadIdx.x % 32 / 4;
    const float* matrix = k_.p.rotation_k + static_cast<int64_t>(place_.head) * T::kDim * T::kDim +
                          MatrixRow(0) * T::kDim + column;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * e >= place_.slice()) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        matrix_[0][e][i] = k_.p.rotation_k != nullptr
                               ? matrix[(i % 2 + i / 2 * 8) * T::kDim + 8 * e]
                           : MatrixRow(i) == column + 8 * e ? 1.0f
                                                            : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void LoadQuery() {
    const int lane = threadIdx.x % 32, step = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + i * 8;
      query_[i] = query_[i + 2] = 0;
      if (8 * i < T::kRows && row < rows_.columns) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(
                                   static_cast<const Bf16*>(k_.p.q) +
                                   rows_.IndexOf(k_, place_.sequence, place_.head, row) * T::kDim) +
                               8 * step + lane % 4;
        query_[i] = from[0];
        query_[i + 2] = from[4];
      }
    }
  }

  __device__ __forceinline__ void MultiplyTile(const uint32_t (&a)[2][4], const float (&matrix)[4],
                                               float (&acc)[4]) const {
    uint32_t high[2], rest[2];
    ptx::SplitBf16(matrix[0], matrix[1], &high[0], &rest[0]);
    ptx::SplitBf16(matrix[2], matrix[3], &high[1], &rest[1]);
    ptx::MmaBf16(acc, a[0], high[0], high[1]);
    ptx::MmaBf16(acc, a[0], rest[0], rest[1]);
    if (half_) {
      ptx::MmaBf16(acc, a[1], high[0], high[1]);
      ptx::MmaBf16(acc, a[1], rest[0], rest[1]);
    }
  }

  // Row i's elements of a quad, or of two tiles, to the row's place.
  __device__ __forceinline__ void Keep(const float (&acc)[4][4], int i, int quad,
                                       float* row) const {
    const int c = threadIdx.x % 4;
    if (place_.slice() >= 32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 2 * i + half;
        *reinterpret_cast<float4*>(row + 32 * quad + 8 * c + 4 * half) =
            make_float4(acc[0][at], acc[1][at], acc[2][at], acc[3][at]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * e < place_.slice()) {
          *reinterpret_cast<float2*>(row + 8 * e + 2 * c) =
              make_float2(acc[e][2 * i], acc[e][2 * i + 1]);
        }
      }
    }
  }

  const DecodeKernelParams& k_;
  const ClusterPlace& place_;
  const QueryRows rows_;
  const bool half_;
  float matrix_[kQuadsMax][4][4];
  uint32_t query_[4];
};

// Leaves a warp's sums at `to`, rows of channels, and its states as those of `warp`.
template <class T>
__device__ __forceinline__ void KeepWarpSums(const ClusterMemory<T>& memory, uint32_t to, int warp,
                                             SegmentState<T>& state) {
  const int lane = threadIdx.x % 32;
  RowState* own =
      reinterpret_cast<RowState*>(memory.shared + memory.at.warp_state) + warp * T::kRows;
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
    const float sum = SumOverTokens(state.sum[i]);
    if (lane < 4) own[T::RowOf(lane, i)] = {state.reference[i], sum};
  }
#pragma unroll
  for (int n = 0; n < T::kColumnTiles; ++n) {
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
      const float(&o)[4] = state.out[n][m];
#pragma unroll
      for (int e = 0; e < (T::Paired(n) ? 2 : 4); ++e) {
        const int row = T::RowOf(lane, T::Paired(n) ? 2 * n : 2 * n + e % 2);
        const int channel = 16 * m + (T::Paired(n) ? e : e / 2) * 8 + lane / 4;
        ptx::StoreShared(to + 4 * (row * ClusterMemory<T>::kSumStride + channel),
                         T::Paired(n) ? o[2 * e] + o[2 * e + 1] : o[e]);
      }
    }
  }
}

// Which of a block's warps take pages: the first ones. The others take the windows.
struct WarpRoles {
  int pages;           // warps that take pages
  int active_pages;    // that have any, the first of them
  int active_windows;  // the same of the windows' warps
};

// Sums over the block's warps, to one maximum; stores each slice to the block that owns it. A warp
// for each row.
template <class T>
__device__ __forceinline__ void SendBlockSums(const ClusterMemory<T>& memory,
                                              const ClusterPlace& place, const WarpRoles& roles) {
  static_assert(T::kDim / 4 == 32);
  const int lane = threadIdx.x % 32, slice = place.slice();
  const int windows_end = roles.pages + roles.active_windows;
  const bool windows = lane >= roles.pages;
  const RowState* states = reinterpret_cast<const RowState*>(memory.shared + memory.at.warp_state);
  const uint32_t barrier = memory.Barrier(kPartialSums);
  for (int row = threadIdx.x / 32; row < T::kRows; row += ClusterMemory<T>::kWarps) {
    RowState mine = {kNoLogit, 0.0f};
    if (windows ? lane < windows_end : lane < roles.active_pages) {
      mine = states[lane * T::kRows + row];
    }
    float reference = mine.reference;
    for (int step = 1; step < 32; step *= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    }
    const float factor = ptx::Exp2(mine.reference - reference);
    const uint32_t from = 4 * (row * ClusterMemory<T>::kSumStride + 4 * lane);
    const auto load = [&](int warp) {
      const uint4 x = ptx::LoadShared128(memory.Slots(warp) + from);
      return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                         __uint_as_float(x.w));
    };
    const auto sum = [&](int begin, int end) {
      float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int w = begin; w < end; ++w) {
        const float f = __shfl_sync(~0u, factor, w);
        const float4 x = load(w);
        all = make_float4(fmaf(f, x.x, all.x), fmaf(f, x.y, all.y), fmaf(f, x.z, all.z),
                          fmaf(f, x.w, all.w));
      }
      return all;
    };
    const float4 history = sum(0, roles.active_pages);
    const float4 plain = sum(roles.pages, windows_end);
    const int owner = 4 * lane >> place.slice_log2;
    const int at = (place.rank * T::kRows + row) * 2 * slice + (4 * lane & (slice - 1));
    const uint32_t to = ptx::MapShared(memory.Address(memory.at.partial + 4 * at), owner);
    const uint32_t owner_barrier = ptx::MapShared(barrier, owner);
    ptx::StoreRemote(to, history, owner_barrier);
    ptx::StoreRemote(to + 4 * slice, plain, owner_barrier);
    float total = mine.sum * factor, mass = windows ? 0.0f : total;
    for (int step = 1; step < 32; step *= 2) {
      total += __shfl_xor_sync(~0u, total, step);
      mass += __shfl_xor_sync(~0u, mass, step);
    }
    if (lane < place.blocks) {
      const uint32_t state =
          memory.Address(memory.at.block_state) + 16 * (place.rank * T::kRows + row);
      ptx::StoreRemote(ptx::MapShared(state, lane), make_float4(reference, total, mass, 0.0f),
                       ptx::MapShared(barrier, lane));
    }
  }
}

// Merges what the cluster's blocks sent of this block's slice, and stores the history's part, the
// mean added, to all of them. A thread for each row and channel.
template <class T>
__device__ __forceinline__ void MergeSlice(const DecodeKernelParams& k,
                                           const ClusterMemory<T>& memory,
                                           const ClusterPlace& place) {
  const QueryRows rows(k);
  const int slice = place.slice();
  const float* partial = memory.Floats(memory.at.partial);
  const float4* states = reinterpret_cast<const float4*>(memory.shared + memory.at.block_state);
  const bool sinks = k.p.sink_logit != nullptr && place.part == 0;
  if (threadIdx.x >= T::kRows << place.slice_log2) return;
  ptx::WaitRemote(memory.Barrier(kPartialSums), 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < T::kRows << place.slice_log2; i += blockDim.x) {
    const int row = i >> place.slice_log2, channel = i & (slice - 1);
    const int own_channel = place.rank * slice + channel;
    const float mean =
        k.p.mean_v != nullptr ? k.p.mean_v[place.head * T::kDim + own_channel] : 0.0f;
    const float sink =
        sinks ? k.p.sink_logit[place.head * rows.heads + rows.HeadOf(row)] * kLog2E : kNoLogit;
    float reference = sink;
#pragma unroll 4
    for (int from = 0; from < place.blocks; ++from) {
      reference = fmaxf(reference, states[from * T::kRows + row].x);
    }
    float sum = sinks ? ptx::Exp2(sink - reference) : 0.0f;
    float mass = 0.0f, history = 0.0f, plain = 0.0f;
#pragma unroll 4
    for (int from = 0; from < place.blocks; ++from) {
      const float4 state = states[from * T::kRows + row];
      const float* x = partial + (from * T::kRows + row) * 2 * slice + channel;
      const float factor = ptx::Exp2(state.x - reference);
      sum = fmaf(factor, state.y, sum);
      mass = fmaf(factor, state.z, mass);
      history = fmaf(factor, x[0], history);
      plain = fmaf(factor, x[slice], plain);
    }
    history = fmaf(mass, mean, history);
    const uint32_t to =
        memory.Address(memory.at.merged) + 4 * (row * kStageStride<T::kDim> + own_channel);
#pragma unroll 4
    for (int block = 0; block < place.blocks; ++block) {
      ptx::StoreRemote(ptx::MapShared(to, block), history,
                       ptx::MapShared(memory.Barrier(kMergedSlices), block));
    }
    memory.Floats(memory.at.plain)[i] = plain;
    if (channel == 0) {
      reinterpret_cast<RowState*>(memory.shared + memory.at.row_state)[row] = {reference, sum};
    }
  }
}

// Starts to copy the block's rows of R_V to shared memory, where the query's products were. By the
// block's first `warps`, after they have sent them.
template <class T>
__device__ __forceinline__ void AskTurn(const DecodeKernelParams& k, const ClusterMemory<T>& memory,
                                        const ClusterPlace& place, int warps) {
  constexpr int kPieces = T::kDim / 4;  // of 16 bytes, in a row
  if (k.p.rotation_v != nullptr) {
    const float* from = k.p.rotation_v + static_cast<int64_t>(place.head) * T::kDim * T::kDim +
                        place.rank * place.slice() * T::kDim;
    const uint32_t to = memory.Address(memory.at.rotation);
    for (int i = threadIdx.x; i < place.slice() * kPieces; i += 32 * warps) {
      ptx::CopyAsync16(to + 4 * (i / kPieces * kStageStride<T::kDim> + i % kPieces * 4),
                       from + 4 * i);
    }
  }
  ptx::CommitCopies();
}

// Turns the merged history back by R_V', adds the windows' part, and calls `use(row, channel of the
// slice, value, state)`, once for each row and channel. A warp multiplies 8 channels; factors in
// two bf16 parts.
template <class T, class Use>
__device__ __forceinline__ void TurnSlice(const DecodeKernelParams& k,
                                          const ClusterMemory<T>& memory, const ClusterPlace& place,
                                          const Use& use) {
  const int lane = threadIdx.x % 32;
  const float* merged = memory.Floats(memory.at.merged) + lane / 4 * kStageStride<T::kDim>;
  const float* rotation = memory.Floats(memory.at.rotation) + lane / 4 * kStageStride<T::kDim>;
  const RowState* states = reinterpret_cast<const RowState*>(memory.shared + memory.at.row_state);
  ptx::WaitRemote(memory.Barrier(kMergedSlices), 0);
  const auto split = [](const float4& x, uint32_t(&high)[2], uint32_t(&low)[2]) {
    ptx::SplitBf16(x.x, x.y, &high[0], &low[0]);
    ptx::SplitBf16(x.z, x.w, &high[1], &low[1]);
  };
  for (int tile = static_cast<int>(threadIdx.x) / 32; tile < place.slice() / 8;
       tile += ClusterMemory<T>::kWarps) {
    float acc[3][4] = {};
    if (k.p.rotation_v != nullptr) {
#pragma unroll 4
      for (int step = 0; step < T::kSteps; ++step) {
        // A lane takes four neighbouring channels of 16, which a product may see in any order.
        const int at = 16 * step + lane % 4 * 4;
        uint32_t a_high[4] = {}, a_low[4] = {}, b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < (T::kRows > 8 ? 2 : 1); ++i) {
          if (lane / 4 + 8 * i >= T::kRows) continue;
          uint32_t high[2], low[2];
          split(*reinterpret_cast<const float4*>(merged + 8 * i * kStageStride<T::kDim> + at), high,
                low);
          a_high[i] = high[0], a_high[i + 2] = high[1];
          a_low[i] = low[0], a_low[i + 2] = low[1];
        }
        split(*reinterpret_cast<const float4*>(rotation + 8 * tile * kStageStride<T::kDim> + at),
              b_high, b_low);
        ptx::MmaBf16(acc[0], a_high, b_high[0], b_high[1]);
        ptx::MmaBf16(acc[1], a_high, b_low[0], b_low[1]);
        ptx::MmaBf16(acc[2], a_low, b_high[0], b_high[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < (T::kRows > 8 ? 4 : 2); ++e) {
      const int row = lane / 4 + e / 2 * 8, channel = 8 * tile + lane % 4 * 2 + e % 2;
      if (row >= T::kRows) continue;
      float value = acc[0][e] + (acc[1][e] + acc[2][e]);
      if (k.p.rotation_v == nullptr) {
        value =
            merged[e / 2 * 8 * kStageStride<T::kDim> + (place.rank << place.slice_log2) + channel];
      }
      value += memory.Floats(memory.at.plain)[(row << place.slice_log2) + channel];
      use(row, channel, value, states[row]);
    }
  }
}

__device__ __forceinline__ void StoreOut(const DecodeKernelParams& k, int64_t at, float x) {
  if (k.p.out_type == OutType::kF32) {
    static_cast<float*>(k.p.out)[at] = x;
  } else {
    static_cast<uint16_t*>(k.p.out)[at] = static_cast<uint16_t>(
        k.p.out_type == OutType::kFp16 ? ptx::PackHalf(x, 0.0f) : ptx::PackBf16(x, 0.0f));
  }
}

// Writes a row's channel, and its sum once.
template <class T>
__device__ __forceinline__ void StoreRowChannel(const DecodeKernelParams& k,
                                                const ClusterPlace& place, int row, int channel,
                                                float value, const RowState& state) {
  const QueryRows rows(k);
  if (row >= rows.columns) return;
  const int64_t index = rows.IndexOf(k, place.sequence, place.head, row);
  const int own_channel = place.rank * place.slice() + channel;
  StoreOut(k, index * T::kDim + own_channel, state.sum > 0.0f ? value / state.sum : 0.0f);
  if (own_channel == 0 && k.p.lse != nullptr) {
    k.p.lse[index] = (state.reference + log2f(state.sum)) / kLog2E;
  }
}

// Several clusters have parts of the pair: the last of them to bring its slice adds them up, in
// their order. What it reads of up to kTogether parts is asked for at once.
template <class T>
__device__ __forceinline__ void FinishParts(const DecodeKernelParams& k,
                                            const ClusterMemory<T>& memory,
                                            const ClusterPlace& place) {
  constexpr int kTogether = 8;
  // [pairs, blocks, parts, rows]
  const int first = (place.first << k.launch.cluster.blocks_log2) + place.rank * place.parts;
  RowState* states = reinterpret_cast<RowState*>(k.workspace.row_state) + first * T::kRows;
  // [pairs, blocks, parts, rows, slice]
  float* partial =
      k.workspace.partial + (static_cast<int64_t>(first) * T::kRows << place.slice_log2);
  const int own = place.part * T::kRows;
  TurnSlice<T>(k, memory, place, [&](int row, int channel, float value, const RowState& state) {
    partial[((own + row) << place.slice_log2) + channel] = value;
    if (channel == 0) states[own + row] = state;
  });
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    int32_t* arrivals =
        k.workspace.arrivals + (place.pair << k.launch.cluster.blocks_log2) + place.rank;
    last = ptx::AddReleaseAcquire(arrivals, 1) == place.parts - 1;
    if (last) *arrivals = 0;
  }
  if (!__syncthreads_or(last)) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < T::kRows << place.slice_log2; i += blockDim.x) {
    const int row = i >> place.slice_log2, channel = i & (place.slice() - 1);
    RowState all = {kNoLogit, 0.0f};
    float value = 0.0f;
#pragma unroll 1
    for (int base = 0; base < place.parts; base += kTogether) {
      float2 state[kTogether];
      float x[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        state[j] = make_float2(kNoLogit, 0.0f);
        x[j] = 0.0f;
        if (base + j < place.parts) {
          const int at = (base + j) * T::kRows + row;
          state[j] = __ldcg(reinterpret_cast<const float2*>(states) + at);
          x[j] = __ldcg(partial + (at << place.slice_log2) + channel);
        }
      }
      float reference = all.reference;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) reference = fmaxf(reference, state[j].x);
      const float factor = ptx::Exp2(all.reference - reference);
      all = {reference, all.sum * factor};
      value *= factor;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float weight = ptx::Exp2(state[j].x - reference);
        all.sum = fmaf(weight, state[j].y, all.sum);
        value = fmaf(weight, x[j], value);
      }
    }
    StoreRowChannel<T>(k, place, row, channel, value, all);
  }
}

// Writes the sequence, or this part of it.
template <class T>
__device__ __forceinline__ void FinishSlice(const DecodeKernelParams& k,
                                            const ClusterMemory<T>& memory,
                                            const ClusterPlace& place) {
  if (place.parts > 1) {
    FinishParts<T>(k, memory, place);
    return;
  }
  TurnSlice<T>(k, memory, place, [&](int row, int channel, float value, const RowState& state) {
    StoreRowChannel<T>(k, place, row, channel, value, state);
  });
}

#endif

}  // namespace crumb::kernels::cuda
