// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/cluster_memory.cuh"

// The end of a cluster: blocks exchange their sums by slices of the channels, merge them,
// inverse-rotate the history's part and write the output. If several clusters share the problem,
// the last one to arrive adds their parts.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Stores a warp's sums at `to`, as rows of channels, and its softmax states.
template <class T>
__device__ __forceinline__ void StoreWarpSums(const ClusterMemory<T>& memory, uint32_t to, int warp,
                                              SegmentState<T>& state) {
  const int lane = threadIdx.x % 32;
  RowState* own =
      reinterpret_cast<RowState*>(memory.shared + memory.at.warp_state) + warp * T::kRows;
#pragma unroll
  for (int i = 0; i < T::kLaneRows; ++i) {
    const float sum = SumOverTokens(state.sum[i]);
    if (lane < 4) own[T::RowOf(lane, i)] = {state.running_max[i], sum};
  }
#pragma unroll
  for (int n = 0; n < T::kQueryTiles; ++n) {
#pragma unroll
    for (int m = 0; m < T::kSteps; ++m) {
      const float(&o)[4] = state.out[n][m];
#pragma unroll
      for (int e = 0; e < (T::Interleaved(n) ? 2 : 4); ++e) {
        const int row = T::RowOf(lane, T::Interleaved(n) ? 2 * n : 2 * n + e % 2);
        const int channel = 16 * m + (T::Interleaved(n) ? e : e / 2) * 8 + lane / 4;
        ptx::StoreShared(to + 4 * (row * ClusterMemory<T>::kSumStride + channel),
                         T::Interleaved(n) ? o[2 * e] + o[2 * e + 1] : o[e]);
      }
    }
  }
}

// The roles of a block's warps. The first warps process pages, the others windows.
struct WarpRoles {
  int pages;           // warps that process pages
  int active_pages;    // warps, the first ones, that have at least one page
  int active_windows;  // warps, after `pages`, that have at least one chunk
};

// Sums over the block's warps relative to a common maximum and stores each slice to the block that
// owns it. One warp processes a row.
template <class T>
__device__ __forceinline__ void SendBlockSums(const ClusterMemory<T>& memory,
                                              const ClusterPlace& place, const WarpRoles& roles) {
  static_assert(T::kDim / 4 == 32);
  constexpr int kWarps = ClusterMemory<T>::kWarps;
  const int lane = threadIdx.x % 32, slice = place.slice();
  const int windows_end = roles.pages + roles.active_windows;
  const bool windows = lane >= roles.pages;
  const RowState* states = reinterpret_cast<const RowState*>(memory.shared + memory.at.warp_state);
  const uint32_t barrier = memory.Barrier(kPartialSums);
  for (int row = threadIdx.x / 32; row < T::kRows; row += kWarps) {
    RowState mine = {kNoLogit, 0.0f};
    if (windows ? lane < windows_end : lane < roles.active_pages) {
      mine = states[lane * T::kRows + row];
    }
    float running_max = mine.running_max;
    for (int step = 1; step < 32; step *= 2) {
      running_max = fmaxf(running_max, __shfl_xor_sync(~0u, running_max, step));
    }
    const float factor = ptx::Exp2(mine.running_max - running_max);
    const uint32_t from = 4 * (row * ClusterMemory<T>::kSumStride + 4 * lane);
    const auto add = [&](float f, const uint4& x, float4* sum) {
      *sum =
          make_float4(fmaf(f, __uint_as_float(x.x), sum->x), fmaf(f, __uint_as_float(x.y), sum->y),
                      fmaf(f, __uint_as_float(x.z), sum->z), fmaf(f, __uint_as_float(x.w), sum->w));
    };
    float4 history = make_float4(0.0f, 0.0f, 0.0f, 0.0f), bf16_part = history;
    if (roles.active_pages > 0) {
      // The sums of all warps are loaded at once. Warps without pages repeat the last one with
      // weight 0.
      uint4 x[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        x[w] = ptx::LoadShared128(memory.Slots(min(w, roles.active_pages - 1)) + from);
      }
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float f = __shfl_sync(~0u, factor, w);
        add(w < roles.active_pages ? f : 0.0f, x[w], &history);
      }
    }
#pragma unroll 1
    for (int w = roles.pages; w < windows_end; ++w) {
      add(__shfl_sync(~0u, factor, w), ptx::LoadShared128(memory.Slots(w) + from), &bf16_part);
    }
    const int owner = 4 * lane >> place.slice_log2;
    const int at = (place.rank * T::kRows + row) * 2 * slice + (4 * lane & (slice - 1));
    const uint32_t to = ptx::MapShared(memory.Address(memory.at.partial + 4 * at), owner);
    const uint32_t owner_barrier = ptx::MapShared(barrier, owner);
    ptx::StoreRemote(to, history, owner_barrier);
    ptx::StoreRemote(to + 4 * slice, bf16_part, owner_barrier);
    float total = mine.sum * factor, mass = windows ? 0.0f : total;
    for (int step = 1; step < 32; step *= 2) {
      total += __shfl_xor_sync(~0u, total, step);
      mass += __shfl_xor_sync(~0u, mass, step);
    }
    if (lane < place.blocks) {
      const uint32_t state =
          memory.Address(memory.at.block_state) + 16 * (place.rank * T::kRows + row);
      ptx::StoreRemote(ptx::MapShared(state, lane), make_float4(running_max, total, mass, 0.0f),
                       ptx::MapShared(barrier, lane));
    }
  }
}

// Merges the slices that the cluster's blocks have sent to this block, adds the mean, and stores
// the history's part to all blocks. One thread processes a row and channel.
template <class T>
__device__ __forceinline__ void MergeSlice(const DecodeKernelParams& k,
                                           const ClusterMemory<T>& memory,
                                           const ClusterPlace& place) {
  const QueryRows rows = RowsOf<T>(k);
  const int slice = place.slice();
  const float* partial = memory.Floats(memory.at.partial);
  const float4* states = reinterpret_cast<const float4*>(memory.shared + memory.at.block_state);
  const bool sinks = k.p.sink_logit != nullptr && place.part == 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < T::kRows << place.slice_log2; i += blockDim.x) {
    const int row = i >> place.slice_log2, channel = i & (slice - 1);
    const int own_channel = place.rank * slice + channel;
    const float mean =
        k.p.mean_v != nullptr ? k.p.mean_v[place.head * T::kDim + own_channel] : 0.0f;
    const float sink =
        sinks ? k.p.sink_logit[place.head * rows.heads + rows.HeadOf(row)] * kLog2E : kNoLogit;
    ptx::WaitRemote(memory.Barrier(kPartialSums), 0);
    float running_max = sink;
#pragma unroll 1
    for (int from = 0; from < place.blocks; from += 2) {
      running_max = fmaxf(running_max, states[from * T::kRows + row].x);
      running_max = fmaxf(running_max, states[(from + 1) * T::kRows + row].x);
    }
    float sum = sinks ? ptx::Exp2(sink - running_max) : 0.0f;
    float mass = 0.0f, history = 0.0f, bf16_part = 0.0f;
#pragma unroll 1
    for (int base = 0; base < place.blocks; base += 2) {
#pragma unroll
      for (int from = base; from < base + 2; ++from) {
        const float4 state = states[from * T::kRows + row];
        const float* x = partial + (from * T::kRows + row) * 2 * slice + channel;
        const float factor = ptx::Exp2(state.x - running_max);
        sum = fmaf(factor, state.y, sum);
        mass = fmaf(factor, state.z, mass);
        history = fmaf(factor, x[0], history);
        bf16_part = fmaf(factor, x[slice], bf16_part);
      }
    }
    history = fmaf(mass, mean, history);
    const uint32_t to =
        memory.Address(memory.at.merged) + 4 * (row * kStageStride<T::kDim> + own_channel);
#pragma unroll 1
    for (int block = 0; block < place.blocks; ++block) {
      ptx::StoreRemote(ptx::MapShared(to, block), history,
                       ptx::MapShared(memory.Barrier(kMergedSlices), block));
    }
    memory.Floats(memory.at.bf16_part)[i] = bf16_part;
    if (channel == 0) {
      reinterpret_cast<RowState*>(memory.shared + memory.at.row_state)[row] = {running_max, sum};
    }
  }
}

// Starts copying the block's rows of R_V to shared memory, in the place of query_parts. REQUIRES:
// the block's first `warps` warps call it, after they have sent the query.
template <class T>
__device__ __forceinline__ void PrefetchInverseRotation(const DecodeKernelParams& k,
                                                        const ClusterMemory<T>& memory,
                                                        const ClusterPlace& place, int warps) {
  constexpr int kPieces = T::kDim / 4;  // 16-byte pieces of a row
  if (RotatesValues<T>(k)) {
    const float* from = k.p.rotation_v + static_cast<int64_t>(place.head) * T::kDim * T::kDim +
                        place.rank * place.slice() * T::kDim;
    const uint32_t to = memory.Address(memory.at.rotation);
#pragma unroll 1
    for (int i = threadIdx.x; i < place.slice() * kPieces; i += 32 * warps) {
      ptx::CopyAsync16(to + 4 * (i / kPieces * kStageStride<T::kDim> + i % kPieces * 4),
                       from + 4 * i);
    }
  }
  ptx::CommitCopies();
}

// Multiplies the merged history by the block's rows of R_V, adds the windows' part and calls
// `use(row, channel of the slice, values of this channel and the next, state)` once for each row
// and two channels. A warp multiplies 8 channels; both factors are split into two bf16 parts.
template <class T, class Use>
__device__ __forceinline__ void InverseRotateSlice(const DecodeKernelParams& k,
                                                   const ClusterMemory<T>& memory,
                                                   const ClusterPlace& place, const Use& use) {
  constexpr int kHalves = T::kRows > 8 ? 2 : 1;  // halves of 8 rows
  constexpr int kTogether = 4;                   // steps whose factors are loaded at once
  const int lane = threadIdx.x % 32;
  const float* merged = memory.Floats(memory.at.merged) + lane / 4 * kStageStride<T::kDim>;
  const RowState* states = reinterpret_cast<const RowState*>(memory.shared + memory.at.row_state);
  ptx::WaitRemote(memory.Barrier(kMergedSlices), 0);
  const auto split = [](const uint4& x, uint32_t(&high)[2], uint32_t(&low)[2]) {
    ptx::SplitBf16(__uint_as_float(x.x), __uint_as_float(x.y), &high[0], &low[0]);
    ptx::SplitBf16(__uint_as_float(x.z), __uint_as_float(x.w), &high[1], &low[1]);
  };
  for (int tile = static_cast<int>(threadIdx.x) / 32; tile < place.slice() / 8;
       tile += ClusterMemory<T>::kWarps) {
    float acc[3][4] = {};
    if (RotatesValues<T>(k)) {
      // A lane loads four neighbouring channels of 16: an MMA sums channels in any order. Rows that
      // do not exist repeat the last one, and their results are not used.
      uint32_t from[kHalves];
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        const int row = min(lane / 4 + 8 * i, T::kRows - 1);
        from[i] =
            memory.Address(memory.at.merged) + 4 * (row * kStageStride<T::kDim> + lane % 4 * 4);
      }
      uint32_t rotation = memory.Address(memory.at.rotation) +
                          4 * ((8 * tile + lane / 4) * kStageStride<T::kDim> + lane % 4 * 4);
#pragma unroll 1
      for (int step = 0; step < T::kSteps; step += kTogether) {
        uint4 a[kTogether][kHalves], b[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          b[j] = ptx::LoadShared128(rotation + 64 * j);
#pragma unroll
          for (int i = 0; i < kHalves; ++i) a[j][i] = ptx::LoadShared128(from[i] + 64 * j);
        }
        rotation += 64 * kTogether;
#pragma unroll
        for (int i = 0; i < kHalves; ++i) from[i] += 64 * kTogether;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          uint32_t a_high[4] = {}, a_low[4] = {}, b_high[2], b_low[2];
#pragma unroll
          for (int i = 0; i < kHalves; ++i) {
            uint32_t high[2], low[2];
            split(a[j][i], high, low);
            a_high[i] = high[0], a_high[i + 2] = high[1];
            a_low[i] = low[0], a_low[i + 2] = low[1];
          }
          split(b[j], b_high, b_low);
          ptx::MmaBf16(acc[0], a_high, b_high[0], b_high[1]);
          ptx::MmaBf16(acc[1], a_high, b_low[0], b_low[1]);
          ptx::MmaBf16(acc[2], a_low, b_high[0], b_high[1]);
        }
      }
    }
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      const int row = lane / 4 + half * 8, channel = 8 * tile + lane % 4 * 2;
      if (row >= T::kRows) continue;
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        value[e] = half == 0 ? acc[0][e] + (acc[1][e] + acc[2][e])
                             : acc[0][2 + e] + (acc[1][2 + e] + acc[2][2 + e]);
        if (!RotatesValues<T>(k)) {
          value[e] = merged[half * 8 * kStageStride<T::kDim> + (place.rank << place.slice_log2) +
                            channel + e];
        }
        value[e] += memory.Floats(memory.at.bf16_part)[(row << place.slice_log2) + channel + e];
      }
      use(row, channel, make_float2(value[0], value[1]), states[row]);
    }
  }
}

// Stores two neighbouring elements of the output.
__device__ __forceinline__ void StoreOut(const DecodeKernelParams& k, int64_t at, float x,
                                         float y) {
  if (k.p.out_type == OutType::kF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(k.p.out) + at) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(k.p.out) + at) = ptx::PackBf16(x, y);
  }
}

// Divides two of a row's channels by the softmax sum and writes them; writes the row's lse once.
template <class T>
__device__ __forceinline__ void StoreRowChannels(const DecodeKernelParams& k,
                                                 const ClusterPlace& place, int row, int channel,
                                                 float2 value, const RowState& state) {
  const QueryRows rows = RowsOf<T>(k);
  if (row >= rows.count) return;
  const int64_t index = rows.IndexOf(k, place.sequence, place.head, row);
  const int own_channel = place.rank * place.slice() + channel;
  const float part = state.sum != 0.0f ? 1.0f / state.sum : 0.0f;  // NaN stays
  StoreOut(k, index * T::kDim + own_channel, value.x * part, value.y * part);
  if (own_channel == 0 && k.p.lse != nullptr) {
    k.p.lse[index] = (state.running_max + ptx::Log2(state.sum)) * (1.0f / kLog2E);
  }
}

// Arrival of the clusters of one problem. The cluster that arrives last reads the other clusters'
// slices and writes the output. Clusters count themselves before they merge their own sums, so the
// slices that the last one waits for are already on their way. One thread of each block counts and
// shares the result with its block.
__device__ __forceinline__ bool Counts(const ClusterPlace& place) {
  return place.parts > 1 && threadIdx.x == blockDim.x - 32;
}
__device__ __forceinline__ int32_t* ArrivalsOf(const DecodeKernelParams& k,
                                               const ClusterPlace& place) {
  return k.workspace.arrivals + (place.problem << k.launch.cluster.blocks_log2) + place.rank;
}
__device__ __forceinline__ int CountArrival(const DecodeKernelParams& k,
                                            const ClusterPlace& place) {
  return Counts(place) ? ptx::AddRelaxed(ArrivalsOf(k, place), 1) : 0;
}
template <class T>
__device__ __forceinline__ void StoreArrivals(const DecodeKernelParams& k,
                                              const ClusterMemory<T>& memory,
                                              const ClusterPlace& place, int before) {
  if (!Counts(place)) return;
  if (before == place.parts - 1) *ArrivalsOf(k, place) = 0;
  *reinterpret_cast<int*>(memory.shared + memory.at.arrived) = before;
}

// Packs two channels of a row, its running max and its sum. The running max is never all zero bits,
// which mark a packet that has not arrived.
__device__ __forceinline__ ptx::Packet PackPart(float2 value, const RowState& state) {
  const auto pack = [](uint32_t low, uint32_t high) {
    return low | static_cast<uint64_t>(high) << 32;
  };
  const uint32_t running_max =
      state.running_max == 0.0f ? 0x80000000u : __float_as_uint(state.running_max);
  return {pack(__float_as_uint(value.x), __float_as_uint(value.y)),
          pack(running_max, __float_as_uint(state.sum))};
}
__device__ __forceinline__ float LowFloat(uint64_t x) {
  return __uint_as_float(static_cast<uint32_t>(x));
}
__device__ __forceinline__ float HighFloat(uint64_t x) {
  return __uint_as_float(static_cast<uint32_t>(x >> 32));
}

// Writes the output if the cluster is alone or the last to arrive, after adding all parts in their
// order; else stores its part for the last one. A packet that has been read is cleared for the next
// call.
template <class T>
__device__ __forceinline__ void FinishSlice(const DecodeKernelParams& k,
                                            const ClusterMemory<T>& memory,
                                            const ClusterPlace& place) {
  constexpr int kTogether = T::kRows > 8 ? 16 : 8;
  // [problems, blocks, parts, rows, slice / 2]
  const int first = (place.first << k.launch.cluster.blocks_log2) + place.rank * place.parts;
  const int stride = T::kRows << (place.slice_log2 - 1);
  ptx::Packet* packets = reinterpret_cast<ptx::Packet*>(k.workspace.packets) + first * stride;
  const bool last = place.parts == 1 || *reinterpret_cast<const int*>(
                                            memory.shared + memory.at.arrived) == place.parts - 1;
  InverseRotateSlice<T>(
      k, memory, place, [&](int row, int channel, float2 value, const RowState& own) {
        ptx::Packet* packet = packets + (((row << place.slice_log2) + channel) >> 1);
        const ptx::Packet mine = PackPart(value, own);
        if (__builtin_expect(!last, 1)) {
          ptx::StorePacket(packet + place.part * stride, mine);
          return;
        }
        RowState all = {kNoLogit, 0.0f};
        float2 total = make_float2(0.0f, 0.0f);
        if (place.parts == 1) {
          all = own;
          total = value;
        }
#pragma unroll 1
        for (int base = 0; place.parts > 1 && base < place.parts; base += kTogether) {
          // The number of loads does not depend on the number of parts, so that all are in flight
          // at once.
          ptx::Packet* from[kTogether];
          ptx::Packet x[kTogether];
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            from[j] = packet + min(base + j, place.parts - 1) * stride;
          }
          bool here;
          do {
#pragma unroll
            for (int j = 0; j < kTogether; ++j) x[j] = ptx::LoadPacket(from[j]);
            here = true;
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
              if (base + j == place.part || base + j >= place.parts) x[j] = mine;
              here &= static_cast<uint32_t>(x[j].high) != 0;
            }
          } while (!here);
          float running_max = all.running_max, other[kTogether];
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            *reinterpret_cast<uint4*>(from[j]) = make_uint4(0, 0, 0, 0);
            other[j] = base + j < place.parts ? LowFloat(x[j].high) : kNoLogit;
            running_max = fmaxf(running_max, other[j]);
          }
          const float factor = ptx::Exp2(all.running_max - running_max);
          all = {running_max, all.sum * factor};
          total = make_float2(total.x * factor, total.y * factor);
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            const float weight = ptx::Exp2(other[j] - running_max);
            all.sum = fmaf(weight, HighFloat(x[j].high), all.sum);
            total.x = fmaf(weight, LowFloat(x[j].low), total.x);
            total.y = fmaf(weight, HighFloat(x[j].low), total.y);
          }
        }
        StoreRowChannels<T>(k, place, row, channel, total, all);
      });
}

#endif

}  // namespace crumb::kernels::cuda
