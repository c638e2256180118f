// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/cluster_memory.cuh"

// How a cluster ends: its blocks' sums, merged by slices, turned back and written, by one cluster
// or by several that have parts of the pair.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

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
    float reference = mine.reference;
    for (int step = 1; step < 32; step *= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    }
    const float factor = ptx::Exp2(mine.reference - reference);
    const uint32_t from = 4 * (row * ClusterMemory<T>::kSumStride + 4 * lane);
    const auto add = [&](float f, const uint4& x, float4* sum) {
      *sum =
          make_float4(fmaf(f, __uint_as_float(x.x), sum->x), fmaf(f, __uint_as_float(x.y), sum->y),
                      fmaf(f, __uint_as_float(x.z), sum->z), fmaf(f, __uint_as_float(x.w), sum->w));
    };
    float4 history = make_float4(0.0f, 0.0f, 0.0f, 0.0f), plain = history;
    if (roles.active_pages > 0) {
      // All warps' sums at once; for those that have none the last one's count nothing.
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
      add(__shfl_sync(~0u, factor, w), ptx::LoadShared128(memory.Slots(w) + from), &plain);
    }
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
    float reference = sink;
#pragma unroll 1
    for (int from = 0; from < place.blocks; from += 2) {
      reference = fmaxf(reference, states[from * T::kRows + row].x);
      reference = fmaxf(reference, states[(from + 1) * T::kRows + row].x);
    }
    float sum = sinks ? ptx::Exp2(sink - reference) : 0.0f;
    float mass = 0.0f, history = 0.0f, plain = 0.0f;
#pragma unroll 1
    for (int base = 0; base < place.blocks; base += 2) {
#pragma unroll
      for (int from = base; from < base + 2; ++from) {
        const float4 state = states[from * T::kRows + row];
        const float* x = partial + (from * T::kRows + row) * 2 * slice + channel;
        const float factor = ptx::Exp2(state.x - reference);
        sum = fmaf(factor, state.y, sum);
        mass = fmaf(factor, state.z, mass);
        history = fmaf(factor, x[0], history);
        plain = fmaf(factor, x[slice], plain);
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

// Turns the merged history back by R_V', adds the windows' part, and calls `use(row, channel of the
// slice, values of this channel and the next, state)`, once for each row and two channels. A warp
// multiplies 8 channels; factors in two bf16 parts.
template <class T, class Use>
__device__ __forceinline__ void TurnSlice(const DecodeKernelParams& k,
                                          const ClusterMemory<T>& memory, const ClusterPlace& place,
                                          const Use& use) {
  constexpr int kHalves = T::kRows > 8 ? 2 : 1;  // of 8 rows
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
      // A lane takes four neighbouring channels of 16, which a product may see in any order. Rows
      // that do not exist are the last one again: nobody reads what becomes of them.
      uint32_t from[kHalves];
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        const int row = min(lane / 4 + 8 * i, T::kRows - 1);
        from[i] =
            memory.Address(memory.at.merged) + 4 * (row * kStageStride<T::kDim> + lane % 4 * 4);
      }
      uint32_t turn = memory.Address(memory.at.rotation) +
                      4 * ((8 * tile + lane / 4) * kStageStride<T::kDim> + lane % 4 * 4);
#pragma unroll 1
      for (int step = 0; step < T::kSteps; step += kTogether) {
        uint4 a[kTogether][kHalves], b[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          b[j] = ptx::LoadShared128(turn + 64 * j);
#pragma unroll
          for (int i = 0; i < kHalves; ++i) a[j][i] = ptx::LoadShared128(from[i] + 64 * j);
        }
        turn += 64 * kTogether;
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
        value[e] += memory.Floats(memory.at.plain)[(row << place.slice_log2) + channel + e];
      }
      use(row, channel, make_float2(value[0], value[1]), states[row]);
    }
  }
}

// Two neighbouring elements of the output.
__device__ __forceinline__ void StoreOut(const DecodeKernelParams& k, int64_t at, float x,
                                         float y) {
  if (k.p.out_type == OutType::kF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(k.p.out) + at) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(k.p.out) + at) = ptx::PackBf16(x, y);
  }
}

// Writes two of a row's channels, and its sum once.
template <class T>
__device__ __forceinline__ void StoreRowChannels(const DecodeKernelParams& k,
                                                 const ClusterPlace& place, int row, int channel,
                                                 float2 value, const RowState& state) {
  const QueryRows rows = RowsOf<T>(k);
  if (row >= rows.columns) return;
  const int64_t index = rows.IndexOf(k, place.sequence, place.head, row);
  const int own_channel = place.rank * place.slice() + channel;
  const float part = state.sum != 0.0f ? 1.0f / state.sum : 0.0f;  // NaN stays
  StoreOut(k, index * T::kDim + own_channel, value.x * part, value.y * part);
  if (own_channel == 0 && k.p.lse != nullptr) {
    k.p.lse[index] = (state.reference + ptx::Log2(state.sum)) * (1.0f / kLog2E);
  }
}

// Several clusters have parts of the pair. The one that comes last to this point, where it still
// has its sums to merge, reads the others' slices and writes the pair's; so those it waits for are
// under way. One thread of each block asks how many came before, and leaves the answer for all.
__device__ __forceinline__ bool Counts(const ClusterPlace& place) {
  return place.parts > 1 && threadIdx.x == blockDim.x - 32;
}
__device__ __forceinline__ int32_t* ArrivalsOf(const DecodeKernelParams& k,
                                               const ClusterPlace& place) {
  return k.workspace.arrivals + (place.pair << k.launch.cluster.blocks_log2) + place.rank;
}
__device__ __forceinline__ int CountPart(const DecodeKernelParams& k, const ClusterPlace& place) {
  return Counts(place) ? ptx::AddRelaxed(ArrivalsOf(k, place), 1) : 0;
}
template <class T>
__device__ __forceinline__ void KeepCount(const DecodeKernelParams& k,
                                          const ClusterMemory<T>& memory, const ClusterPlace& place,
                                          int before) {
  if (!Counts(place)) return;
  if (before == place.parts - 1) *ArrivalsOf(k, place) = 0;
  *reinterpret_cast<int*>(memory.shared + memory.at.arrived) = before;
}

// Two channels of a row in one part, and what they are relative to. Never all zero bits, which say
// that nothing has come.
__device__ __forceinline__ ptx::Packet PackPart(float2 value, const RowState& state) {
  const auto pack = [](uint32_t low, uint32_t high) {
    return low | static_cast<uint64_t>(high) << 32;
  };
  const uint32_t reference =
      state.reference == 0.0f ? 0x80000000u : __float_as_uint(state.reference);
  return {pack(__float_as_uint(value.x), __float_as_uint(value.y)),
          pack(reference, __float_as_uint(state.sum))};
}
__device__ __forceinline__ float LowFloat(uint64_t x) {
  return __uint_as_float(static_cast<uint32_t>(x));
}
__device__ __forceinline__ float HighFloat(uint64_t x) {
  return __uint_as_float(static_cast<uint32_t>(x >> 32));
}

// Writes the sequence, or this part, or adds up all of them in their order. A packet that has been
// read is cleared for the next call.
template <class T>
__device__ __forceinline__ void FinishSlice(const DecodeKernelParams& k,
                                            const ClusterMemory<T>& memory,
                                            const ClusterPlace& place) {
  constexpr int kTogether = T::kRows > 8 ? 16 : 8;
  // [pairs, blocks, parts, rows, slice / 2]
  const int first = (place.first << k.launch.cluster.blocks_log2) + place.rank * place.parts;
  const int stride = T::kRows << (place.slice_log2 - 1);
  ptx::Packet* packets = reinterpret_cast<ptx::Packet*>(k.workspace.packets) + first * stride;
  const bool last = place.parts == 1 || *reinterpret_cast<const int*>(
                                            memory.shared + memory.at.arrived) == place.parts - 1;
  TurnSlice<T>(k, memory, place, [&](int row, int channel, float2 value, const RowState& own) {
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
      // As many loads however many parts there are, so that all of them are under way at once.
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
      float reference = all.reference, other[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        *reinterpret_cast<uint4*>(from[j]) = make_uint4(0, 0, 0, 0);
        other[j] = base + j < place.parts ? LowFloat(x[j].high) : kNoLogit;
        reference = fmaxf(reference, other[j]);
      }
      const float factor = ptx::Exp2(all.reference - reference);
      all = {reference, all.sum * factor};
      total = make_float2(total.x * factor, total.y * factor);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const float weight = ptx::Exp2(other[j] - reference);
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
