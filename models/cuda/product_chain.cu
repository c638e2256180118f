// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/product_chain.h"

#include <algorithm>

#include "models/cuda/chain_stream.cuh"
#include "models/cuda/launch.cuh"

namespace crumb::models::cuda {
namespace {

#if __CUDA_ARCH__ >= 900

// A warp that multiplies.
template <int kRows>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const KernelParams& k, SharedState<kRows>* state, char* x,
                                      Ring ring)
      : k_(k), state_(state), x_(x), ring_(ring), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {
    group_warp_ = warp_ % kGroupWarps;
    next_piece_ = warp_ / kGroupWarps;
    const uint32_t lane_bytes = 2 * kStep * group_warp_ + lane_ % 4 * 16;
    x_lane_ = ptx::SharedAddress(x_) + lane_ / 4 % kRows * k_.x_stride + lane_bytes;
    w_lane_ = lane_ / 4 * kRowStride + lane_bytes;
    if (warp_ >= kGroupWarps) ring_.Next();
  }

  __device__ __forceinline__ void Run() {
    PrefetchNorms();
    for (int index = 0; index < k_.chain.count; ++index) {
      const ChainProduct& p = k_.chain.products[index];
      if (p.norm_weight != nullptr) {
        Normalize(p, index);
      } else {
        Wait(index);
        Copy(p);
      }
      const WorkRange range = state_->ranges[index];
      for (int tile = 0; tile < range.tiles; ++tile) Multiply(p, range, tile);
      if (held_ >= 0) AddUp(p, range);
      if (index + 1 < k_.chain.count) Arrive();
    }
  }

 private:
  // Prefetches the weights of norms, because later they would queue behind the copies of all
  // blocks.
  __device__ __forceinline__ void PrefetchNorms() const {
    for (int index = 0; index < k_.chain.count; ++index) {
      const ChainProduct& p = k_.chain.products[index];
      if (p.norm_weight == nullptr) continue;
      for (int i = 64 * threadIdx.x; i < p.inputs; i += 64 * kThreads) {
        ptx::PrefetchL2(p.norm_weight + i);
      }
    }
  }

  // Signals to the other blocks that this block has written its outputs.
  __device__ __forceinline__ void Arrive() {
    ptx::SyncThreads(kConsumers, kThreads);
    if (threadIdx.x != 0) return;
    // Every round adds 2^31 in all, so the highest bit changes.
    arrived_ = ptx::AddReleaseAcquire(k_.chain.barrier,
                                      blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
  }

  // Waits for the rows from which x is made: for the previous kernel, or for all blocks.
  __device__ __forceinline__ void Wait(int index) {
    if (index == 0) {
      ptx::WaitForPrevious();
      return;
    }
    if (threadIdx.x == 0) {
      while (((ptx::LoadAcquire(k_.chain.barrier) ^ arrived_) & 0x80000000u) == 0) {
      }
    }
    ptx::SyncThreads(kConsumers, kThreads);
  }

  // Stores 16 bytes of a row of x in shared memory in the word order 0, 2, 1, 3, so that the
  // registers of one load are operands of both mma.sync of a step, with rows 8 to 15 of the second.
  __device__ __forceinline__ void KeepVector(int row, int i, const uint4& v) const {
    ptx::StoreShared128(ptx::SharedAddress(x_) + row * k_.x_stride + 16 * i, {v.x, v.z, v.y, v.w});
  }

  __device__ __forceinline__ void Copy(const ChainProduct& p) {
    const int vectors = p.inputs / kVector;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint4* from = reinterpret_cast<const uint4*>(p.x) + static_cast<int64_t>(r) * vectors;
#pragma unroll 4
      for (int i = threadIdx.x; i < vectors; i += kThreads) KeepVector(r, i, __ldcg(from + i));
    }
    ptx::SyncThreads(kConsumers, kThreads);
  }

  static __device__ __forceinline__ void Unpack(const uint4& v, float (&x)[kVector]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = ptx::LowBf16(words[i]);
      x[2 * i + 1] = ptx::HighBf16(words[i]);
    }
  }

  __device__ __forceinline__ void Normalize(const ChainProduct& p, int index) {
    const int vectors = p.inputs / kVector;
    uint4 weight[kNormVectors] = {}, v[kRows][kNormVectors] = {};
#pragma unroll
    for (int j = 0; j < kNormVectors; ++j) {
      const int i = threadIdx.x + j * kThreads;
      if (i < vectors) weight[j] = __ldg(reinterpret_cast<const uint4*>(p.norm_weight) + i);
    }
    Wait(index);
#pragma unroll
    for (int j = 0; j < kNormVectors; ++j) {
      const int i = threadIdx.x + j * kThreads;
      if (i >= vectors) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        v[r][j] =
            __ldcg(reinterpret_cast<const uint4*>(p.x) + static_cast<int64_t>(r) * vectors + i);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float square = 0.0f;
#pragma unroll
      for (int j = 0; j < kNormVectors; ++j) {
        float x[kVector];
        Unpack(v[r][j], x);
#pragma unroll
        for (int e = 0; e < kVector; ++e) square = fmaf(x[e], x[e], square);
      }
      for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
      if (lane_ == 0) state_->squares[warp_][r] = square;
    }
    ptx::SyncThreads(kConsumers, kThreads);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float square = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) square += state_->squares[w][r];
      const float factor = rsqrtf(square / p.inputs + k_.chain.epsilon);
#pragma unroll
      for (int j = 0; j < kNormVectors; ++j) {
        const int i = threadIdx.x + j * kThreads;
        if (i >= vectors) continue;
        float x[kVector], scale[kVector];
        Unpack(v[r][j], x);
        Unpack(weight[j], scale);
#pragma unroll
        for (int e = 0; e < kVector; ++e) x[e] *= factor * scale[e];
        KeepVector(r, i,
                   {ptx::PackBf16(x[0], x[1]), ptx::PackBf16(x[2], x[3]), ptx::PackBf16(x[4], x[5]),
                    ptx::PackBf16(x[6], x[7])});
      }
    }
    ptx::SyncThreads(kConsumers, kThreads);
  }

  // Multiplies a tile of W; each warp takes every eighth step of its group's pieces. No warp waits
  // for the others; one of them adds the partial sums up later.
  __device__ __forceinline__ void Multiply(const ChainProduct& p, const WorkRange& range,
                                           int tile) {
    const bool adds = warp_ == adder_;
    adder_ = adder_ + 1 == kWarps ? 0 : adder_ + 1;
    unsigned short before = 0;
    if (adds && p.output == ChainOutput::kAdd) {
      const Place place(p, range, tile, lane_);
      if (place.mine) before = __ldcg(static_cast<const unsigned short*>(p.y) + place.at);
    }
    float even[4] = {}, odd[4] = {};
    const uint32_t x_stride = 2 * kStep * range.piece_steps;
    int piece = next_piece_;
    next_piece_ ^= range.pieces % kGroups;
    uint32_t x = x_lane_ + x_stride * piece;
    for (; piece < range.pieces; piece += kGroups) {
      const int steps = range.Steps(piece) - group_warp_;
      const uint32_t w = ring_.slot() + w_lane_;
      uint4 xs[kSteps], ws[kSteps];
      ring_.WaitFull();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (j * kGroupWarps >= steps) continue;
        ws[j] = ptx::LoadShared128(w + 2 * kStep * kGroupWarps * j);
        // Other rows of the mma.sync are not used.
        if (lane_ < 4 * kRows) xs[j] = ptx::LoadShared128(x + 2 * kStep * kGroupWarps * j);
      }
      x += kGroups * x_stride;
      __syncwarp();
      if (lane_ == 0) ring_.ArriveEmpty();
      ring_.Next(kGroups);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (j * kGroupWarps >= steps) continue;
        const uint32_t a[4] = {xs[j].x, xs[j].y, xs[j].z, xs[j].w};
        ptx::MmaBf16(even, a, ws[j].x, ws[j].y);
        ptx::MmaBf16(odd, a, ws[j].z, ws[j].w);
      }
    }
    auto& sums = state_->sums[open_];
    if (lane_ / 4 < kRows) {
      *reinterpret_cast<float2*>(&sums[warp_][lane_ / 4][lane_ % 4 * 2]) =
          make_float2(even[0] + odd[2], even[1] + odd[3]);
    }
    if (held_ >= 0) AddUp(p, range);
    if (adds) {
      held_ = tile * 16 + open_;
      held_before_ = before;
    } else {
      ptx::ArriveThreads(kTileSums + open_, kThreads);
    }
    open_ = open_ + 1 == kOpenTiles ? 0 : open_ + 1;
  }

  // Adds up the tile that this warp holds, after it has multiplied another one, so that no warp
  // waits for it.
  __device__ __forceinline__ void AddUp(const ChainProduct& p, const WorkRange& range) {
    const int open = held_ % 16;
    ptx::SyncThreads(kTileSums + open, kThreads);
    const Place place(p, range, held_ / 16, lane_);
    float total = 0.0f;
    if (place.row < kRows) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total += state_->sums[open][w][place.row][lane_ % kTile];
      }
    }
    Store(p, place, held_before_, p.scale * total);
    held_ = -1;
  }

  // The output of a lane in a tile that its warp adds up.
  struct Place {
    int row;
    bool mine;   // the lane has an output
    int64_t at;  // in y

    __device__ __forceinline__ Place(const ChainProduct& p, const WorkRange& range, int tile,
                                     int lane)
        : row(lane / kTile) {
      const int column = lane % kTile;
      mine = row < kRows && column < range.Count(tile);
      const int width = p.output == ChainOutput::kGate ? p.outputs / 2 : p.outputs;
      at = static_cast<int64_t>(row) * width + range.Begin(tile) + column;
    }
  };

  __device__ __forceinline__ void Store(const ChainProduct& p, const Place& place,
                                        unsigned short before, float total) const {
    float y = total;
    if (p.output == ChainOutput::kGate) {
      y = __fdividef(total, 1.0f + __expf(-total)) * __shfl_down_sync(~0u, total, kTile / 2);
    } else if (p.output == ChainOutput::kAdd) {
      y += ptx::LowBf16(before);
    }
    if (!place.mine) return;
    if (p.output == ChainOutput::kF32) {
      static_cast<float*>(p.y)[place.at] = y;
    } else {
      static_cast<__nv_bfloat16*>(p.y)[place.at] = __float2bfloat16(y);
    }
  }

  const KernelParams& k_;
  SharedState<kRows>* state_;
  char* x_;
  Ring ring_;
  int lane_, warp_, group_warp_;
  uint32_t x_lane_, w_lane_;  // first address of the lane in rows of x, and offset in a slot
  int next_piece_;            // the group's next piece of a tile
  int adder_ = 0;             // the warp that adds the next tile up
  int open_ = 0;              // the partial sums of the next tile
  int held_ = -1;             // tile * 16 + partial sums that this warp adds up next; -1: none
  unsigned short held_before_ = 0;
  uint32_t arrived_ = 0;
};

#endif

// Shared memory holds the ring, the rows of x, and the state.
template <int kRows>
__global__ void __launch_bounds__(kBlockThreads, 1)
    ChainKernel(const __grid_constant__ KernelParams k) {
#if __CUDA_ARCH__ >= 900
  ptx::LaunchDependents();
  extern __shared__ __align__(128) char shared[];
  char* x = shared + k.slots * kSlotBytes;
  auto* state = reinterpret_cast<SharedState<kRows>*>(x + kRows * k.x_stride);
  if (threadIdx.x == kThreads) {
    for (int i = 0; i < k.slots; ++i) {
      ptx::InitBarrier(ptx::SharedAddress(state->full + i), 1);
      ptx::InitBarrier(ptx::SharedAddress(state->empty + i), kGroupWarps);
      state->issued[i] = -1;
    }
    ptx::FenceBarrierInit();
    ptx::FenceCopyEngine();
  }
  if (threadIdx.x < k.chain.count) {
    state->ranges[threadIdx.x] = WorkRangeOf(k, threadIdx.x);
  }
  __syncthreads();
  const Ring ring(state->full, state->empty, shared, k.slots);
  if (threadIdx.x >= kThreads) {
    Stream(k, state->ranges, ring, state->issued, threadIdx.x / 32 - kWarps).Run();
  } else {
    Consumer<kRows>(k, state, x, ring).Run();
  }
#endif
}

struct Device {
  int major = 0;
  int processors = 0;
  int shared_bytes = 0;  // most bytes per block
  int clock_khz = 0, memory_khz = 0, bus_bits = 0;
};

cudaError_t QueryDevice(Device* d) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](cudaDeviceAttr attribute, int* to) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(to, attribute, device);
  };
  get(cudaDevAttrComputeCapabilityMajor, &d->major);
  get(cudaDevAttrMultiProcessorCount, &d->processors);
  get(cudaDevAttrMaxSharedMemoryPerBlockOptin, &d->shared_bytes);
  get(cudaDevAttrClockRate, &d->clock_khz);
  get(cudaDevAttrMemoryClockRate, &d->memory_khz);
  get(cudaDevAttrGlobalMemoryBusWidth, &d->bus_bits);
  return error;
}

bool ValidProduct(const ChainProduct& p) {
  const int most = p.norm_weight != nullptr ? kThreads * kNormVectors * kVector : 1 << 20;
  return p.inputs >= kStep && p.inputs % kStep == 0 && p.inputs <= most && p.outputs >= 1 &&
         (p.output != ChainOutput::kGate || p.outputs % 2 == 0);
}

// Returns a block's part of 103 % of the memory's nominal rate, or 0 if the driver does not report
// it.
uint32_t PaceFor(const Device& device) {
  const double bytes = 1.03 * 2.0 * device.memory_khz * device.bus_bits / 8;
  if (bytes <= 0 || device.clock_khz <= 0) return 0;
  const double cycles = 1.0 * device.clock_khz * device.processors / bytes;
  return static_cast<uint32_t>(65536.0 *
                               std::min(cycles, 0.5));  // the cycles of a piece stay below 2^32
}

Division Divide(const ChainProduct& p, uint32_t blocks) {
  const uint32_t units = p.output == ChainOutput::kGate ? p.outputs / 2 : p.outputs;
  Division d;
  d.each = units / blocks;
  d.rest = units % blocks;
  d.steps = p.inputs / kStep;
  d.pieces = (d.steps + kPieceMax / kStep - 1) / (kPieceMax / kStep);
  d.piece_steps = (d.steps + d.pieces - 1) / d.pieces;
  return d;
}

// Returns false if the chain is not served.
bool LayOut(const ProductChain& chain, const Device& device, KernelParams* k) {
  if (device.major < 9 || chain.rows < 1 || chain.rows > kFewRows || chain.count < 1 ||
      chain.count > kChainProductsMax) {
    return false;
  }
  k->chain = chain;
  k->x_stride = 0;
  for (int i = 0; i < chain.count; ++i) {
    if (!ValidProduct(chain.products[i])) return false;
    k->x_stride = std::max(k->x_stride, XStride(chain.products[i].inputs));
    k->divisions[i] = Divide(chain.products[i], device.processors);
  }
  // A pace makes chains of several rows slower, and short chains, whose blocks hardly diverge.
  k->pace = chain.rows == 1 && chain.count > 2 ? PaceFor(device) : 0;
  k->ahead = k->pace > 0 ? kAheadPaced : kAhead;
  k->blocks_reciprocal = static_cast<uint32_t>(((uint64_t{1} << 32) - 1) / device.processors + 1);
  const int64_t room = device.shared_bytes - static_cast<int64_t>(sizeof(SharedState<1>)) -
                       (chain.rows - 1) * kStateRowBytes -
                       static_cast<int64_t>(chain.rows) * k->x_stride;
  k->slots = static_cast<int>(std::min<int64_t>(room / kSlotBytes, kSlotsMax));
  return k->slots >= kSlotsMin;
}

template <int kRows>
cudaError_t Enqueue(const KernelParams& k, int blocks, cudaStream_t stream) {
  const size_t bytes =
      k.slots * size_t{kSlotBytes} + kRows * k.x_stride + sizeof(SharedState<kRows>);
  const cudaError_t error = cudaFuncSetAttribute(
      ChainKernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  return LaunchWithShared(ChainKernel<kRows>, dim3(blocks), kBlockThreads, bytes, stream, k);
}

}  // namespace

bool ServesChain(const ProductChain& chain) {
  Device device;
  KernelParams k;
  return QueryDevice(&device) == cudaSuccess && LayOut(chain, device, &k);
}

cudaError_t MultiplyChain(const ProductChain& chain, cudaStream_t stream) {
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  KernelParams k;
  if (!LayOut(chain, device, &k)) return cudaErrorInvalidValue;
  switch (chain.rows) {
    case 1:
      return Enqueue<1>(k, device.processors, stream);
    case 2:
      return Enqueue<2>(k, device.processors, stream);
    case 3:
      return Enqueue<3>(k, device.processors, stream);
    default:
      return Enqueue<4>(k, device.processors, stream);
  }
}

}  // namespace crumb::models::cuda
