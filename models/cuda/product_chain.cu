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
constexpr int kStreamWarps = 4;  // that ask for weights
constexpr int kBlockThreads = kThreads + 32 * kStreamWarps;
constexpr int kVector = 8;
constexpr int kNormVectors = 2;  // of a thread
constexpr int kAhead = 3;        // pieces of a block that are on their way
constexpr int kAheadPaced = 4;   // the same where it asks at a pace
constexpr int kSlotsMin = 3;
constexpr int kSlotsMax = 10;

// From one row to the next 64 bytes more than lines: lanes' loads of two rows lie in different
// banks.
constexpr int kRowStride = 2 * kPieceMax + 64;
constexpr int kSlotBytes = kTile * kRowStride;
static_assert(kRowStride % 128 == 64);

// What blocks divide among them, divided by the host: divisions would delay what is asked for
// first.
struct Division {
  uint32_t each, rest;  // outputs of a block, of gates pairs; and what is left, over all blocks
  int pieces, piece_steps, steps;
};

struct KernelParams {
  ProductChain chain;
  Division divisions[kChainProductsMax];
  uint32_t blocks_reciprocal;  // 2^32 / blocks, rounded up
  uint32_t pace;               // cycles of a block from byte to byte, in 1/65536; 0: as they come
  int ahead;                   // pieces of a block that are on their way
  int slots;
  int x_stride;  // bytes
};

__host__ __device__ constexpr int XStride(int inputs) {
  return (2 * inputs + 127) / 128 * 128 + 64;
}

// Sums of tiles that some warps have left and others not: a warp that waits for a piece knows that
// those of kSlotsMax pieces before have been read by all of their group, and who adds a tile up has
// multiplied one more by then.
constexpr int kOpenTiles = kSlotsMax + 4;

// The outputs of a block, in tiles of as many or one less, and the pieces of a row.
struct alignas(16) Share {
  int begin, tiles, each, larger;
  int pieces, piece_steps, steps;

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ int Begin(int tile) const {
    return begin + tile * each + min(tile, larger);
  }
  __device__ __forceinline__ int Count(int tile) const { return each + (tile < larger ? 1 : 0); }
  // Of a piece.
  __device__ __forceinline__ int Steps(int piece) const {
    return min(piece_steps, steps - piece * piece_steps);
  }
#endif
};

template <int kRows>
struct SharedState {
  Share shares[kChainProductsMax];
  uint64_t full[kSlotsMax], empty[kSlotsMax];
  int asked[kSlotsMax];  // piece of the chain that was last asked for, into each slot; at first -1
  float squares[kWarps][kRows];
  alignas(8) float sums[kOpenTiles][kWarps][kRows][kTile];
};

constexpr int64_t kStateRowBytes = sizeof(SharedState<2>) - sizeof(SharedState<1>);
static_assert(sizeof(SharedState<4>) == sizeof(SharedState<1>) + 3 * kStateRowBytes);

#if __CUDA_ARCH__ >= 900

constexpr int kAheadWaiting = 2;                         // pieces on their way while blocks wait
constexpr int kPaceBurst = 2000;                         // cycles that may be made good
constexpr int kSteps = kPieceMax / kStep / kGroupWarps;  // of a warp
constexpr int kConsumers = 1;                            // barrier of the warps that multiply
constexpr int kTileSums = 2;                             // barriers of open tiles
static_assert(kTileSums + kOpenTiles <= 16);

__device__ __forceinline__ Share ShareOf(const KernelParams& k, int index) {
  const Division& d = k.divisions[index];
  const bool gate = k.chain.products[index].output == ChainOutput::kGate;
  // Who gets one more than others is another block each time.
  uint32_t block = blockIdx.x + index;
  while (block >= gridDim.x) block -= gridDim.x;
  // Exact: both factors are below the number of blocks.
  const uint32_t before = __umulhi(d.rest * block, k.blocks_reciprocal);
  const uint32_t after = __umulhi(d.rest * (block + 1), k.blocks_reciprocal);
  const uint32_t count = d.each + after - before, most = gate ? kTile / 2 : kTile;
  const uint32_t tiles = (count + most - 1) / most;
  Share share;
  share.begin = static_cast<int>(d.each * block + before);
  share.tiles = static_cast<int>(tiles);
  share.each = static_cast<int>(tiles > 0 ? count / tiles : 0);
  share.larger = static_cast<int>(count) - share.each * share.tiles;
  share.steps = d.steps;
  share.pieces = d.pieces;
  share.piece_steps = d.piece_steps;
  return share;
}

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
  __device__ __forceinline__ int at() const { return at_; }
  __device__ __forceinline__ void WaitFull() const { ptx::WaitBarrier(full(), phase_); }
  __device__ __forceinline__ bool TryFull() const { return ptx::TryWaitBarrier(full(), phase_); }
  // At first all are empty.
  __device__ __forceinline__ void WaitEmpty() const {
    ptx::WaitBarrier(empty_ + 8 * at_, phase_ ^ 1);
  }
  __device__ __forceinline__ void ArriveEmpty() const { ptx::Arrive(empty_ + 8 * at_); }
  __device__ __forceinline__ void Next(int pieces = 1) {
    for (at_ += pieces; at_ >= count_; at_ -= count_) phase_ ^= 1;
  }

 private:
  uint32_t full_, empty_, slots_;
  int count_, at_ = 0, phase_ = 0;
};

// One of kStreamWarps warps, which take a block's pieces in turn.
class Stream {
 public:
  __device__ __forceinline__ Stream(const KernelParams& k, const Share* shares, Ring ring,
                                    volatile int* asked, int warp)
      : chain_(k.chain),
        shares_(shares),
        asked_(asked),
        ring_(ring),
        landed_(ring),
        slots_(k.slots),
        warp_(warp),
        pace_(k.pace),
        due_(ptx::Cycles()) {
    // A group that waits for a slot must know that what it held before has landed: that was its
    // own piece, or one that was seen to land before the group's last one was asked for.
    most_ = min(k.ahead, slots_ % kGroups == 0 ? slots_ : slots_ - kGroups);
    ring_.Next(warp);
  }

  __device__ __forceinline__ void Run() {
    int before = 0;  // pieces of the products before
    for (int index = 0; index < chain_.count; ++index) {
      const Share share = shares_[index];
      // What is asked for before blocks have this product's rows.
      const int early = index > 0 ? slots_ : 0;
      int number = (warp_ - before) & (kStreamWarps - 1), piece = number, tile = 0;
      while (true) {
        for (; piece >= share.pieces; piece -= share.pieces) ++tile;
        if (tile >= share.tiles) break;
        // What is asked for and has not come yet delays every other access by its bytes.
        const int most = number < early ? min(kAheadWaiting, most_) : most_;
        for (; seen_ <= before + number - most; ++seen_) WaitLanded();
        ring_.WaitEmpty();
        WaitUntilDue(share, tile, piece, chain_.products[index].output);
        if (ptx::Elect()) {
          asked_[ring_.at()] = before + number;
          Ask(chain_.products[index], share, tile, piece);
        }
        __syncwarp();
        ring_.Next(kStreamWarps);
        number += kStreamWarps;
        piece += kStreamWarps;
      }
      before += share.tiles * share.pieces;
    }
  }

 private:
  // Piece seen_. To a warp that comes so late that its slot was filled again the barrier's parity
  // says nothing; then what was asked for does.
  __device__ __forceinline__ void WaitLanded() {
    while (!landed_.TryFull() && asked_[landed_.at()] <= seen_) continue;
    landed_.Next();
  }

  // Memory serves whom it likes: blocks that ask as fast as they can get ahead of others, for which
  // all wait in the end.
  __device__ __forceinline__ void WaitUntilDue(const Share& share, int tile, int piece,
                                               ChainOutput output) {
    if (pace_ == 0) return;
    uint32_t now;
    do {
      now = ptx::Cycles();
    } while (static_cast<int>(now - due_) < 0);
    const uint32_t rows = share.Count(tile) * (output == ChainOutput::kGate ? 2 : 1);
    const uint32_t bytes = 2 * kStep * share.Steps(piece) * rows;
    // The other warps ask for as much in between.
    due_ +=
        max(static_cast<int>(now - due_) - kPaceBurst, 0) + (bytes * kStreamWarps * pace_ >> 16);
  }

  __device__ __forceinline__ void Ask(const ChainProduct& p, const Share& share, int tile,
                                      int piece) const {
    const bool gate = p.output == ChainOutput::kGate;
    const int count = share.Count(tile), second_count = gate ? count : count - kTile / 2;
    const uint64_t row_bytes = 2 * static_cast<uint64_t>(p.inputs);
    const uint64_t first = reinterpret_cast<uint64_t>(p.w) + share.Begin(tile) * row_bytes +
                           2 * kStep * share.piece_steps * piece;
    const uint64_t second = first + row_bytes * (gate ? p.outputs / 2 : kTile / 2);
    const uint32_t bytes = 2 * kStep * share.Steps(piece), slot = ring_.slot();
    ptx::ArriveExpecting(ring_.full(), (gate ? 2 * count : count) * bytes);
#pragma unroll
    for (int r = 0; r < kTile / 2; ++r) {
      if (r < count)
        ptx::CopyBulk(slot + r * kRowStride, first + r * row_bytes, bytes, ring_.full());
      if (r < second_count) {
        ptx::CopyBulk(slot + (kTile / 2 + r) * kRowStride, second + r * row_bytes, bytes,
                      ring_.full());
      }
    }
  }

  const ProductChain& chain_;
  const Share* shares_;
  volatile int* asked_;
  Ring ring_, landed_;
  int slots_, warp_;
  int most_;      // pieces on their way
  int seen_ = 0;  // to land
  uint32_t pace_;
  uint32_t due_;  // the clock when this warp may ask again
};

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
      const Share share = state_->shares[index];
      for (int tile = 0; tile < share.tiles; ++tile) Multiply(p, share, tile);
      if (held_ >= 0) AddUp(p, share);
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

  // Rows of x in shared memory: of every 16 bytes the words 0, 2, 1, 3. So the registers of a load
  // are operands of both products, with rows 8 to 15 of the second.
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

  // A tile of W, each warp with every eighth step of its group's pieces. Then all go on; one of
  // them adds the tile up later.
  __device__ __forceinline__ void Multiply(const ChainProduct& p, const Share& share, int tile) {
    const bool adds = warp_ == adder_;
    adder_ = adder_ + 1 == kWarps ? 0 : adder_ + 1;
    unsigned short before = 0;
    if (adds && p.output == ChainOutput::kAdd) {
      const Place place(p, share, tile, lane_);
      if (place.mine) before = __ldcg(static_cast<const unsigned short*>(p.y) + place.at);
    }
    float even[4] = {}, odd[4] = {};
    const uint32_t x_stride = 2 * kStep * share.piece_steps;
    int piece = next_piece_;
    next_piece_ ^= share.pieces % kGroups;
    uint32_t x = x_lane_ + x_stride * piece;
    for (; piece < share.pieces; piece += kGroups) {
      const int steps = share.Steps(piece) - group_warp_;
      const uint32_t w = ring_.slot() + w_lane_;
      uint4 xs[kSteps], ws[kSteps];
      ring_.WaitFull();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (j * kGroupWarps >= steps) continue;
        ws[j] = ptx::LoadShared128(w + 2 * kStep * kGroupWarps * j);
        // Other rows of the product are not used.
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
    if (held_ >= 0) AddUp(p, share);
    if (adds) {
      held_ = tile * 16 + open_;
      held_before_ = before;
    } else {
      ptx::ArriveThreads(kTileSums + open_, kThreads);
    }
    open_ = open_ + 1 == kOpenTiles ? 0 : open_ + 1;
  }

  // The warp's tile, when it has multiplied another: nobody waits for who adds up.
  __device__ __forceinline__ void AddUp(const ChainProduct& p, const Share& share) {
    const int open = held_ % 16;
    ptx::SyncThreads(kTileSums + open, kThreads);
    const Place place(p, share, held_ / 16, lane_);
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

  // A lane's output of a tile, when one warp adds up.
  struct Place {
    int row;
    bool mine;   // there is one
    int64_t at;  // in y

    __device__ __forceinline__ Place(const ChainProduct& p, const Share& share, int tile, int lane)
        : row(lane / kTile) {
      const int column = lane % kTile;
      mine = row < kRows && column < share.Count(tile);
      const int width = p.output == ChainOutput::kGate ? p.outputs / 2 : p.outputs;
      at = static_cast<int64_t>(row) * width + share.Begin(tile) + column;
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
  uint32_t x_lane_, w_lane_;  // where the lane begins in rows of x, and in a slot
  int next_piece_;            // of the group in a tile
  int adder_ = 0;             // the next tile's
  int open_ = 0;              // the next tile's sums
  int held_ = -1;             // the tile that this warp adds up next, and its sums
  unsigned short held_before_ = 0;
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
      ptx::InitBarrier(ptx::SharedAddress(state->full + i), 1);
      ptx::InitBarrier(ptx::SharedAddress(state->empty + i), kGroupWarps);
      state->asked[i] = -1;
    }
    ptx::FenceBarrierInit();
    ptx::FenceCopyEngine();
  }
  if (threadIdx.x < k.chain.count) {
    state->shares[threadIdx.x] = ShareOf(k, threadIdx.x);
  }
  __syncthreads();
  const Ring ring(state->full, state->empty, shared, k.slots);
  if (threadIdx.x >= kThreads) {
    Stream(k, state->shares, ring, state->asked, threadIdx.x / 32 - kWarps).Run();
  } else {
    Consumer<kRows>(k, state, x, ring).Run();
  }
#endif
}

struct Device {
  int major = 0;
  int processors = 0;
  int shared_bytes = 0;  // of a block
  int clock_khz = 0, memory_khz = 0, bus_bits = 0;
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

// A block's part of 103 % of the memory's nominal rate; none where the driver does not tell it.
uint32_t PaceOf(const Device& device) {
  const double bytes = 1.03 * 2.0 * device.memory_khz * device.bus_bits / 8;
  if (bytes <= 0 || device.clock_khz <= 0) return 0;
  const double cycles = 1.0 * device.clock_khz * device.processors / bytes;
  return static_cast<uint32_t>(65536.0 * std::min(cycles, 0.5));  // a piece's stay below 2^32
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
    k->divisions[i] = Divide(chain.products[i], device.processors);
  }
  // Several rows, and chains that end before their blocks have drawn apart, are slower by a pace.
  k->pace = chain.rows == 1 && chain.count > 2 ? PaceOf(device) : 0;
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
