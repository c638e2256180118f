// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/traits.cuh"

// The end of a segment: the warps of a worker have attended its pages in turn, each with a running
// softmax of its own. StorePartial sums them, relative to their common maximum, into the segment's
// partial result in the workspace.
namespace crumb::kernels::cuda {

// A row's softmax state: running max in log2 units, and the sum relative to it.
struct RowState {
  float running_max;
  float sum;
};

// The place in the staging area where the warps of a worker store their states and the addresses of
// their sums.
template <class T>
struct WorkerStates {
  RowState* state;  // [warps, kRows]
  uint32_t* slot;   // [warps]

  __device__ __forceinline__ WorkerStates(float* stage, const Worker& worker)
      : state(reinterpret_cast<RowState*>(stage) + worker.index * worker.warps * (T::kRows + 1)),
        slot(reinterpret_cast<uint32_t*>(state + worker.warps * T::kRows)) {}
};

// Sums the first `active` warps' states into the segment's partial result. `slot` is the warp's
// released slot; `fill` starts the copy into it that was held back. All warps of the worker call
// it.
template <class T, class Fill>
__device__ __forceinline__ void StorePartial(const DecodeKernelParams& k, int segment, int active,
                                             const Worker& worker, uint32_t slot, float* stage,
                                             SegmentState<T>& state, const Fill& fill) {
  const int lane = threadIdx.x % 32;
  const bool mine = worker.warp < active;
  const WorkerStates<T> shared(stage, worker);
  RowState* own = shared.state + worker.warp * T::kRows;
  if (mine) {
    if (lane == 0) shared.slot[worker.warp] = slot;
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) {
      state.sum[i] = SumOverTokens(state.sum[i]);
      if (lane < 4) own[T::RowOf(lane, i)].running_max = state.running_max[i];
    }
  }
  worker.Sync();
  // Each warp scales its sums to the common maximum.
  float factor[T::kLaneRows], running_max[T::kLaneRows];
  if (mine) {
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) {
      const int row = T::RowOf(lane, i);
      running_max[i] = kNoLogit;
      for (int w = 0; w < active; ++w) {
        running_max[i] = fmaxf(running_max[i], shared.state[w * T::kRows + row].running_max);
      }
      factor[i] = ptx::Exp2(state.running_max[i] - running_max[i]);
      if (lane < 4) own[row].sum = state.sum[i] * factor[i];
    }
    if (worker.warp == 0 && lane < 4) {
#pragma unroll
      for (int i = 0; i < T::kLaneRows; ++i) {
        k.workspace.row_state[2 * (static_cast<int64_t>(segment) * T::kRows + T::RowOf(lane, i))] =
            running_max[i];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
    // Rows are padded so that a store's lanes, which hold eight channels of four rows, use
    // different banks.
    constexpr int kQuads = T::kDim / 4;
    static_assert(8 * (T::kDim + 4) * 4 <= T::kTileBytes, "eight rows fit a slot");
    const int rows = T::Interleaved(n) ? 4 : 8, stride = T::kDim + (T::Interleaved(n) ? 8 : 4);
    if (n > 0) worker.Sync();
    if (mine) {
#pragma unroll
      for (int v = 0; v < T::LaneValues(n); ++v) {
        const float* o = state.out[n][T::Interleaved(n) ? v / 2 : v / 4];
        const float x = T::Interleaved(n) ? (o[2 * (v % 2)] + o[2 * (v % 2) + 1]) * factor[2 * n]
                                          : o[v % 4] * factor[(2 * n + v % 2) % T::kLaneRows];
        const int row = T::Interleaved(n) ? lane % 4 : lane % 4 * 2 + v % 2;
        const int channel = 8 * (T::Interleaved(n) ? v : v / 2) + lane / 4;
        ptx::StoreShared(slot + 4 * (row * stride + channel), x);
      }
    }
    worker.Sync();
#pragma unroll 1
    for (int i = worker.thread(); i < rows * kQuads; i += worker.threads()) {
      const int row = i / kQuads, at = 4 * (row * stride + i % kQuads * 4);
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int w = 0; w < active; ++w) {
        const uint4 x = ptx::LoadShared128(shared.slot[w] + at);
        value.x += __uint_as_float(x.x), value.y += __uint_as_float(x.y);
        value.z += __uint_as_float(x.z), value.w += __uint_as_float(x.w);
      }
      const int64_t to = static_cast<int64_t>(segment) * T::kRows + 8 * n + row;
      reinterpret_cast<float4*>(k.workspace.partial)[to * kQuads + i % kQuads] = value;
      if (i % kQuads == 0) {
        float sum = 0.0f;
        for (int w = 0; w < active; ++w) sum += shared.state[w * T::kRows + 8 * n + row].sum;
        k.workspace.row_state[2 * to + 1] = sum;
      }
    }
  }
  worker.Sync();
  if (mine) fill();
}

}  // namespace crumb::kernels::cuda
