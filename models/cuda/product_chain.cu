// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/product_chain.h"

#include <algorithm>

#include "models/cuda/chain_ptx.cuh"
#include "models/cuda/launch.cuh"

// Four warps of a block ask for weights, two groups of eight multiply. A tile is up to eight rows
// of W, which go through a ring of slots in pieces of at most kPieceMax channels, a bulk copy for
// each row; groups take pieces in turn, and warps of a group share the channels of a piece. Rows of
// x are the rows of the tensor cores' product, rows of W its columns. Which channel a product's
// position holds is free as long as both operands agree: a lane takes 16 bytes of each as they lie.
namespace crumb::models::cuda {
namespace {

constexpr int kTile = 8;         // rows of W
constexpr int kStep = 32;        // channels of two products
constexpr int kPieceMax = 1280;  // channels
constexpr int kGroupWarps = 8;
constexpr int kGroups = 2;
constexpr int kWarps = kGroups * kGroupWarps;  // that multiply
constexpr int kThreads = 32 * kWarps;
constexpr int kStreamWarps = 4;  // that ask for weights: a copy takes a warp some 100 cycles
constexpr int kBlockThreads = kThreads + 32 * kStreamWarps;
constexpr int kVector = 8;
constexpr int kNormVectors = 2;  // of a thread
constexpr int kSlotsMin = 3;
constexpr int kSlotsMax = 10;

// From one row to the next 64 bytes more than lines: lanes' loads of two rows lie in different
// banks.
constexpr int kRowStride = 2 * kPieceMax + 64;
constexpr int kSlotBytes = kTile * kRowStride;
static_assert(kRowStride % 128 == 64);

struct KernelParams {
  ProductChain chain;
  int slots;
  int x_stride;  // bytes
};

__host__ __device__ constexpr int XStride(int inputs) {
  return (2 * inputs + 127) / 128 * 128 + 64;
}

// Sums of tiles that some warps have left and others not: a warp that waits for a piece knows that
// those of kSlotsMax pieces before have been read by all of their group.
constexpr int kOpenTiles = kSlotsMax + 3;

template <int kRows>
struct SharedState {
  uint64_t full[kSlotsMax], empty[kSlotsMax];
  float squares[kWarps][kRows];
  float sums[kOpenTiles][kWarps][kRows][kTile];
};

constexpr int64_t kStateRowBytes = sizeof(SharedState<2>) - sizeof(SharedState<1>);
static_assert(sizeof(SharedState<4>) == sizeof(SharedState<1>) + 3 * kStateRowBytes);

#if __CUDA_ARCH__ >= 900

constexpr int kAhead = 3;                                // pieces of a block that are on their way
constexpr int kSteps = kPieceMax / kStep / kGroupWarps;  // of a warp
constexpr int kConsumers = 1;                            // barrier of the warps that multiply
constexpr int kTileSums = 2;                             // barriers of open tiles
static_assert(kTileSums + kOpenTiles <= 16);
static_assert(kAhead <= kSlotsMin, "a slot is not filled again before it was seen to land");

// The outputs of a block, in tiles of as many or one less, and the pieces of a row.
struct Share {
  int begin, tiles, pieces, piece_steps;

  __device__ __forceinline__ Share(const ChainProduct& p, int index) {
    const bool gate = p.output == ChainOutput::kGate;
    const int64_t units = gate ? p.outputs / 2 : p.outputs;
    // Who gets one more than others is another block each time.
    const int64_t blocks = gridDim.x, block = (blockIdx.x + index) % gridDim.x;
    begin = static_cast<int>(units * block / blocks);
    const int count = static_cast<int>(units * (block + 1) / blocks) - begin;
    const int most = gate ? kTile / 2 : kTile;
    tiles = (count + most - 1) / most;
    each_ = tiles > 0 ? count / tiles : 0;
    larger_ = count - each_ * tiles;
    steps_ = p.inputs / kStep;
    pieces = (steps_ + kPieceMax / kStep - 1) / (kPieceMax / kStep);
    piece_steps = (steps_ + pieces - 1) / pieces;
  }
  __device__ __forceinline__ int Begin(int tile) const {
    return begin + tile * each_ + min(tile, larger_);
  }
  __device__ __forceinline__ int Count(int tile) const { return each_ + (tile < larger_ ? 1 : 0); }
  // Of a piece.
  __device__ __forceinline__ int Steps(int piece) const {
    return min(piece_steps, steps_ - piece * piece_steps);
  }

 private:
  int each_, larger_, steps_;
};

class Ring {
 public:
  __device__ __forceinline__ Ring(const uint64_t* full, const uint64_t* empty, char* slots,
                                  int count)
      : full_(ptx::SharedAddress(full)),
        empty_(ptx::SharedAddress(empty)),
        slots_(ptx::SharedAddress(slots)),
        count_(count) {}

  __device__ __forceinline__ uint32_t full() const { return full_ + 8 * at_; }
  __device__ __forceinline__ uint32_t slot() const { return slots_ + at_ * kSlotBytes; }
  __device__ __forceinline__ void WaitFull() const { ptx::WaitBarrier(full(), phase_); }
  // At first all are empty.
  __device__ __forceinline__ void WaitEmpty() const {
    ptx::WaitBarrier(empty_ + 8 * at_, phase_ ^ 1);
  }
  __device__ __forceinline__ void ArriveEmpty() const { ptx::Arrive(empty_ + 8 * at_); }
  __device__ __forceinline__ void Next() {
    if (++at_ == count_) at_ = 0, phase_ ^= 1;
  }

 private:
  uint32_t full_, empty_, slots_;
  int count_, at_ = 0, phase_ = 0;
};

// By one of kStreamWarps warps: rows `warp` and `warp` + 4 of every tile, of gates those of both
// halves.
__device__ __forceinline__ void Stream(const ProductChain& chain, Ring ring, int warp) {
  static_assert(kStreamWarps == kTile / 2);
  const bool leader = threadIdx.x % 32 == 0;
  Ring landed = ring;
  int ahead = 0;
  for (int index = 0; index < chain.count; ++index) {
    const ChainProduct& p = chain.products[index];
    const Share share(p, index);
    const bool gate = p.output == ChainOutput::kGate;
    const int64_t row_bytes = int64_t{2} * p.inputs;
    const int64_t second_bytes = row_bytes * (gate ? p.outputs / 2 : kTile / 2);
    for (int tile = 0; tile < share.tiles; ++tile) {
      const int count = share.Count(tile);
      const int mine = (warp < count ? 1 : 0) + (warp + (gate ? 0 : kTile / 2) < count ? 1 : 0);
      uint64_t from = reinterpret_cast<uint64_t>(p.w) + (share.Begin(tile) + warp) * row_bytes;
      for (int piece = 0; piece < share.pieces; ++piece) {
        const uint32_t bytes = 2 * kStep * share.Steps(piece);
        ring.WaitEmpty();
        // What is asked for and has not come yet delays every other access by its bytes.
        if (ahead == kAhead) {
          landed.WaitFull();
          landed.Next();
        } else {
          ++ahead;
        }
        if (leader) {
          const uint32_t slot = ring.slot() + warp * kRowStride;
          ptx::ArriveExpecting(ring.full(), mine * bytes);
          if (mine > 0) ptx::CopyBulk(slot, from, bytes, ring.full());
          if (mine > 1) {
            ptx::CopyBulk(slot + kTile / 2 * kRowStride, from + second_bytes, bytes, ring.full());
          }
        }
        __syncwarp();
        from += bytes;
        ring.Next();
      }
    }
  }
}

template <int kRows>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const KernelParams& k, SharedState<kRows>* state, char* x,
                                      Ring ring)
      : k_(k), state_(state), x_(x), ring_(ring), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {
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
      const Share share(p, index);
      for (int tile = 0; tile < share.tiles; ++tile) Multiply(p, share, tile);
      if (index + 1 < k_.chain.count) Arrive();
    }
  }

 private:
  // Later they would queue behind the weights that all blocks ask for.
  __device__ __forceinline__ void PrefetchNorms() const {
    for (int index = 0; index < k_.chain.count; ++index) {
      const ChainProduct& p = k_.chain.products[index];
      if (p.norm_weight == nullptr) continue;
      for (int i = 64 * threadIdx.x; i < p.inputs; i += 64 * kThreads) {
        ptx::PrefetchL2(p.norm_weight + i);
      }
    }
  }

  // What this block wrote, all have once they have all arrived.
  __device__ __forceinline__ void Arrive() {
    ptx::SyncThreads(kConsumers, kThreads);
    if (threadIdx.x != 0) return;
    // Every round adds 2^31 in all, so the highest bit turns.
    arrived_ = ptx::AddReleaseAcquire(k_.chain.barrier,
                                      blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
  }

  // For what x is made from.
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

  __device__ __forceinline__ void Copy(const ChainProduct& p) {
    const int vectors = p.inputs / kVector;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint4* from = reinterpret_cast<const uint4*>(p.x) + static_cast<int64_t>(r) * vectors;
      const uint32_t to = ptx::SharedAddress(x_) + r * k_.x_stride;
#pragma unroll 4
      for (int i = threadIdx.x; i < vectors; i += kThreads) {
        ptx::CopyAsync16(to + 16 * i, from + i);
      }
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
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
        ptx::StoreShared128(ptx::SharedAddress(x_) + r * k_.x_stride + 16 * i,
                            {ptx::PackBf16(x[0], x[1]), ptx::PackBf16(x[2], x[3]),
                             ptx::PackBf16(x[4], x[5]), ptx::PackBf16(x[6], x[7])});
      }
    }
    ptx::SyncThreads(kConsumers, kThreads);
  }

  // A tile of W, each warp with every eighth step of its group's pieces; then one warp sums up, and
  // the others go on.
  __device__ __forceinline__ void Multiply(const ChainProduct& p, const Share& share, int tile) {
    const int first = share.Begin(tile), count = share.Count(tile);
    const int warp = tiles_ % kWarps, row = lane_ / kTile, column = lane_ % kTile;
    const bool mine = warp_ == warp && row < kRows && column < count;
    const int64_t at = static_cast<int64_t>(row) * p.outputs + first + column;
    float before = 0.0f;
    if (mine && p.output == ChainOutput::kAdd) {
      before = __bfloat162float(
          __ushort_as_bfloat16(__ldcg(static_cast<const unsigned short*>(p.y) + at)));
    }
    float even[4] = {}, odd[4] = {};
    uint32_t x = ptx::SharedAddress(x_) + lane_ / 4 % kRows * k_.x_stride + lane_ % 4 * 16;
    const int group = warp_ / kGroupWarps, group_warp = warp_ % kGroupWarps;
    int piece = (group + pieces_) % kGroups;
    pieces_ += share.pieces;
    x += 2 * kStep * share.piece_steps * piece;
    for (; piece < share.pieces; piece += kGroups) {
      const int steps = share.Steps(piece);
      const uint32_t w = ring_.slot() + lane_ / 4 * kRowStride + lane_ % 4 * 16;
      uint4 xs[kSteps], ws[kSteps];
      ring_.WaitFull();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int step = group_warp + j * kGroupWarps;
        if (step >= steps) continue;
        ws[j] = ptx::LoadShared128(w + 2 * kStep * step);
        xs[j] = ptx::LoadShared128(x + 2 * kStep * step);
      }
      x += 2 * kStep * share.piece_steps * kGroups;
      __syncwarp();
      if (lane_ == 0) ring_.ArriveEmpty();
      for (int i = 0; i < kGroups; ++i) ring_.Next();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (group_warp + j * kGroupWarps >= steps) continue;
        ptx::MmaBf16(even, {xs[j].x, 0, xs[j].y, 0}, ws[j].x, ws[j].y);
        ptx::MmaBf16(odd, {xs[j].z, 0, xs[j].w, 0}, ws[j].z, ws[j].w);
      }
    }
    const int open = tiles_++ % kOpenTiles;
    auto& sums = state_->sums[open];
    if (lane_ / 4 < kRows) {
      sums[warp_][lane_ / 4][lane_ % 4 * 2] = even[0] + odd[0];
      sums[warp_][lane_ / 4][lane_ % 4 * 2 + 1] = even[1] + odd[1];
    }
    if (warp_ != warp) {
      ptx::ArriveThreads(kTileSums + open, kThreads);
      return;
    }
    ptx::SyncThreads(kTileSums + open, kThreads);
    float total = 0.0f;
    if (row < kRows) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += sums[w][row][column];
    }
    Store(p, at, row, first, mine, count, before, p.scale * total);
  }

  __device__ __forceinline__ void Store(const ChainProduct& p, int64_t at, int row, int first,
                                        bool mine, int count, float before, float total) const {
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y);
    if (p.output == ChainOutput::kGate) {
      const float up = __shfl_down_sync(~0u, total, kTile / 2);
      const int column = lane_ % kTile;
      if (row >= kRows || column >= count) return;
      y[static_cast<int64_t>(row) * (p.outputs / 2) + first + column] =
          __float2bfloat16(total / (1.0f + __expf(-total)) * up);
    } else if (!mine) {
      return;
    } else if (p.output == ChainOutput::kF32) {
      static_cast<float*>(p.y)[at] = total;
    } else {
      y[at] = __float2bfloat16(before + total);
    }
  }

  const KernelParams& k_;
  SharedState<kRows>* state_;
  char* x_;
  Ring ring_;
  int lane_, warp_;
  int tiles_ = 0, pieces_ = 0;  // so far
  uint32_t arrived_ = 0;
};

#endif

// Shared memory: the ring, the rows of x, the state.
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
      ptx::InitBarrier(ptx::SharedAddress(state->full + i), kStreamWarps);
      ptx::InitBarrier(ptx::SharedAddress(state->empty + i), kGroupWarps);
    }
    ptx::FenceBarrierInit();
    ptx::FenceCopyEngine();
  }
  __syncthreads();
  const Ring ring(state->full, state->empty, shared, k.slots);
  if (threadIdx.x >= kThreads) {
    Stream(k.chain, ring, threadIdx.x / 32 - kWarps);
  } else {
    Consumer<kRows>(k, state, x, ring).Run();
  }
#endif
}

struct Device {
  int major = 0;
  int processors = 0;
  int shared_bytes = 0;  // of a block
};

cudaError_t Look(Device* d) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](cudaDeviceAttr attribute, int* to) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(to, attribute, device);
  };
  get(cudaDevAttrComputeCapabilityMajor, &d->major);
  get(cudaDevAttrMultiProcessorCount, &d->processors);
  get(cudaDevAttrMaxSharedMemoryPerBlockOptin, &d->shared_bytes);
  return error;
}

bool ValidProduct(const ChainProduct& p) {
  const int most = p.norm_weight != nullptr ? kThreads * kNormVectors * kVector : 1 << 20;
  return p.inputs >= kStep && p.inputs % kStep == 0 && p.inputs <= most && p.outputs >= 1 &&
         (p.output != ChainOutput::kGate || p.outputs % 2 == 0);
}

// False: not served.
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
  }
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
  return Look(&device) == cudaSuccess && LayOut(chain, device, &k);
}

cudaError_t MultiplyChain(const ProductChain& chain, cudaStream_t stream) {
  Device device;
  const cudaError_t error = Look(&device);
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
