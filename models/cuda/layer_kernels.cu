// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/layer_kernels.h"

#include "models/cuda/launch.cuh"

namespace crumb::models::cuda {
namespace {

namespace ptx = kernels::cuda::ptx;

constexpr int kVector = 8;  // bf16 elements of a 16-byte access
constexpr int kHeadDim = 128;
constexpr int kHeadWarps = 4;
constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxVectors = 4;  // vectors per thread of GreedyTokens

struct Row8 {
  float x[kVector];
};

__device__ __forceinline__ Row8 Unpack(uint4 v) {
  return {{ptx::LowBf16(v.x), ptx::HighBf16(v.x), ptx::LowBf16(v.y), ptx::HighBf16(v.y),
           ptx::LowBf16(v.z), ptx::HighBf16(v.z), ptx::LowBf16(v.w), ptx::HighBf16(v.w)}};
}
__device__ __forceinline__ uint4 Pack(const Row8& r) {
  return {ptx::PackBf16(r.x[0], r.x[1]), ptx::PackBf16(r.x[2], r.x[3]),
          ptx::PackBf16(r.x[4], r.x[5]), ptx::PackBf16(r.x[6], r.x[7])};
}

__device__ __forceinline__ float WarpSum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ float BlockSum(float x) {
  __shared__ float sums[32];
  x = WarpSum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  return WarpSum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

// One block per row and one vector per thread. The row is the token's embedding if `tokens` is
// given, otherwise the residual plus `update`.
__global__ void __launch_bounds__(1024)
    NormKernel(int hidden, float epsilon, const int32_t* tokens, const uint4* table,
               const uint4* update, const uint4* weight, uint4* residual, uint4* out) {
  const int vectors = hidden / kVector, i = threadIdx.x;
  const size_t at = static_cast<size_t>(blockIdx.x) * vectors + i;
  const bool mine = i < vectors;
  const Row8 w = mine ? Unpack(__ldg(weight + i)) : Row8{};
  WaitForPrevious();
  Row8 row = {};
  if (mine && tokens != nullptr) {
    row = Unpack(table[static_cast<size_t>(tokens[blockIdx.x]) * vectors + i]);
  } else if (mine) {
    row = Unpack(residual[at]);
    const Row8 more = Unpack(update[at]);
    for (int j = 0; j < kVector; ++j) row.x[j] += more.x[j];
  }
  const uint4 rounded = Pack(row);
  row = Unpack(rounded);
  float square = 0.0f;
  for (int j = 0; j < kVector; ++j) square += row.x[j] * row.x[j];
  const float factor = rsqrtf(BlockSum(square) / hidden + epsilon);
  if (!mine) return;
  residual[at] = rounded;
  for (int j = 0; j < kVector; ++j) row.x[j] *= factor * w.x[j];
  out[at] = Pack(row);
}

cudaError_t LaunchNorm(const NormShape& s, const int32_t* tokens, const Bf16* table,
                       const Bf16* update, const Bf16* weight, Bf16* residual, Bf16* out,
                       cudaStream_t stream) {
  if (s.rows < 1 || s.hidden < kVector || s.hidden % kVector != 0 || s.hidden > 8192) {
    return cudaErrorInvalidValue;
  }
  const int threads = (s.hidden / kVector + 31) / 32 * 32;
  return Launch(NormKernel, dim3(s.rows), threads, stream, s.hidden, s.epsilon, tokens,
                reinterpret_cast<const uint4*>(table), reinterpret_cast<const uint4*>(update),
                reinterpret_cast<const uint4*>(weight), reinterpret_cast<uint4*>(residual),
                reinterpret_cast<uint4*>(out));
}

// The channels of lane l in a head: 2 l, 2 l + 1, 2 l + 64 and 2 l + 65.
struct Head {
  float x[4];
};

__device__ __forceinline__ Head LoadHead(const Bf16* p, int lane) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(p);
  const uint32_t low = words[lane], high = words[32 + lane];
  return {{ptx::LowBf16(low), ptx::HighBf16(low), ptx::LowBf16(high), ptx::HighBf16(high)}};
}
__device__ __forceinline__ Head StoreHead(const Head& h, int lane, void* p) {
  uint32_t* words = static_cast<uint32_t*>(p);
  const uint32_t low = ptx::PackBf16(h.x[0], h.x[1]), high = ptx::PackBf16(h.x[2], h.x[3]);
  words[lane] = low;
  words[32 + lane] = high;
  return {{ptx::LowBf16(low), ptx::HighBf16(low), ptx::LowBf16(high), ptx::HighBf16(high)}};
}

__device__ __forceinline__ void Normalize(const Bf16* weight, float epsilon, int lane, Head* h) {
  float square = 0.0f;
  for (int j = 0; j < 4; ++j) square += h->x[j] * h->x[j];
  const float factor = rsqrtf(WarpSum(square) / kHeadDim + epsilon);
  const Head w = LoadHead(weight, lane);
  for (int j = 0; j < 4; ++j) h->x[j] *= factor * w.x[j];
}

__device__ __forceinline__ void Turn(const RopeParams& p, int row, int lane, Head* h) {
  const size_t base = static_cast<size_t>(row) * (p.rotary_dim / 2);
  if (p.rotary_dim == kHeadDim) {
    for (int j = 0; j < 2; ++j) {
      const float c = p.cosine[base + 2 * lane + j], s = p.sine[base + 2 * lane + j];
      const float low = h->x[j], high = h->x[2 + j];
      h->x[j] = low * c - high * s;
      h->x[2 + j] = high * c + low * s;
    }
    return;
  }
  // 64 channels are rotated: 2 l + j of the lower 16 lanes with those of the upper 16.
  for (int j = 0; j < 2; ++j) {
    const size_t at = base + 2 * (lane % 16) + j;
    const float c = p.cosine[at], s = p.sine[at];
    const float other = __shfl_xor_sync(~0u, h->x[j], 16);
    h->x[j] = h->x[j] * c + (lane < 16 ? -other : other) * s;
  }
}

__device__ __forceinline__ char* RingRow(const RopeParams& p, int row, int head) {
  const int slot = (p.begin[row] + p.tokens[row] - 1) % p.capacity;
  return reinterpret_cast<char*>(p.ring.address[row]) + p.ring.layer_offset +
         head * p.ring.head_stride + slot * p.ring.token_stride;
}

// One warp per head: query heads, then key heads, then value heads.
__global__ void __launch_bounds__(32 * kHeadWarps) RopeKernel(RopeParams p) {
  const int heads = p.q_heads + 2 * p.kv_heads, row = blockIdx.y, lane = threadIdx.x % 32;
  const int head = blockIdx.x * kHeadWarps + threadIdx.x / 32;
  if (head >= heads) return;
  WaitForPrevious();
  Head h = LoadHead(p.qkv + (static_cast<size_t>(row) * heads + head) * kHeadDim, lane);
  if (head < p.q_heads) {
    if (p.q_weight != nullptr) Normalize(p.q_weight, p.epsilon, lane, &h);
    Turn(p, row, lane, &h);
    const size_t at = static_cast<size_t>(row) * p.q_heads + head;
    h = StoreHead(h, lane, p.q + at * kHeadDim);
    if (p.mean_k == nullptr) return;
    const float* mean = p.mean_k + head / (p.q_heads / p.kv_heads) * kHeadDim;
    const float dot = WarpSum(h.x[0] * mean[2 * lane] + h.x[1] * mean[2 * lane + 1] +
                              h.x[2] * mean[64 + 2 * lane] + h.x[3] * mean[65 + 2 * lane]);
    if (lane == 0) p.offset[at] = dot;
    return;
  }
  const bool is_k = head < p.q_heads + p.kv_heads;
  const int kv_head = (head - p.q_heads) % p.kv_heads;
  if (is_k) {
    if (p.k_weight != nullptr) Normalize(p.k_weight, p.epsilon, lane, &h);
    Turn(p, row, lane, &h);
  }
  if (p.k != nullptr) {
    const size_t at = (static_cast<size_t>(row) * p.kv_heads + kv_head) * kHeadDim;
    StoreHead(h, lane, (is_k ? p.k : p.v) + at);
  } else {
    StoreHead(h, lane, RingRow(p, row, kv_head) + (is_k ? 0 : p.ring.v_offset));
  }
}

__global__ void __launch_bounds__(256) GateKernel(int vectors, const uint4* gate_up, uint4* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  WaitForPrevious();
  const size_t row = blockIdx.y;
  Row8 gate = Unpack(gate_up[row * 2 * vectors + i]);
  const Row8 up = Unpack(gate_up[(row * 2 + 1) * vectors + i]);
  for (int j = 0; j < kVector; ++j) {
    gate.x[j] = gate.x[j] / (1.0f + __expf(-gate.x[j])) * up.x[j];
  }
  out[row * vectors + i] = Pack(gate);
}

// Returns a key that orders by the logit, then by the lowest index.
__device__ __forceinline__ uint64_t Key(float logit, uint32_t index) {
  const uint32_t bits = __float_as_uint(logit);
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - index);
}

__global__ void __launch_bounds__(kArgmaxThreads)
    ArgmaxKernel(int vectors, const uint4* logits, uint64_t* best, uint32_t* done,
                 int32_t* tokens) {
  WaitForPrevious();
  const int row = blockIdx.y;
  uint64_t key = 0;
  for (int k = 0; k < kArgmaxVectors; ++k) {
    const int i = (blockIdx.x * kArgmaxVectors + k) * kArgmaxThreads + threadIdx.x;
    if (i >= vectors) break;
    const Row8 x = Unpack(logits[static_cast<size_t>(row) * vectors + i]);
    for (int j = 0; j < kVector; ++j) key = max(key, Key(x.x[j], i * kVector + j));
  }
  for (int step = 16; step > 0; step /= 2) {
    key = max(key, static_cast<uint64_t>(__shfl_xor_sync(~0u, key, step)));
  }
  __shared__ uint64_t keys[kArgmaxThreads / 32];
  if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const uint64_t other : keys) key = max(key, other);
  atomicMax(reinterpret_cast<unsigned long long*>(best + row), key);
  __threadfence();
  if (atomicAdd(done + row, 1u) + 1 != gridDim.x) return;
  __threadfence();
  const uint64_t greatest = atomicExch(reinterpret_cast<unsigned long long*>(best + row), 0ull);
  tokens[row] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(greatest));
  done[row] = 0;
}

}  // namespace

cudaError_t EmbedAndNorm(const NormShape& shape, const int32_t* tokens, const Bf16* table,
                         const Bf16* weight, Bf16* residual, Bf16* out, cudaStream_t stream) {
  return LaunchNorm(shape, tokens, table, nullptr, weight, residual, out, stream);
}

cudaError_t AddAndNorm(const NormShape& shape, const Bf16* update, const Bf16* weight,
                       Bf16* residual, Bf16* out, cudaStream_t stream) {
  return LaunchNorm(shape, nullptr, nullptr, update, weight, residual, out, stream);
}

cudaError_t NormRopeAppend(const RopeParams& p, cudaStream_t stream) {
  if (p.rows < 1 || p.rows > 65535 || p.head_dim != kHeadDim || p.kv_heads < 1 ||
      p.q_heads % p.kv_heads != 0 || (p.rotary_dim != kHeadDim && p.rotary_dim != kHeadDim / 2)) {
    return cudaErrorInvalidValue;
  }
  const int heads = p.q_heads + 2 * p.kv_heads;
  return Launch(RopeKernel, dim3((heads + kHeadWarps - 1) / kHeadWarps, p.rows), 32 * kHeadWarps,
                stream, p);
}

cudaError_t GateUp(int rows, int width, const Bf16* gate_up, Bf16* out, cudaStream_t stream) {
  if (rows < 1 || rows > 65535 || width < kVector || width % kVector != 0) {
    return cudaErrorInvalidValue;
  }
  const int vectors = width / kVector;
  return Launch(GateKernel, dim3((vectors + 255) / 256, rows), 256, stream, vectors,
                reinterpret_cast<const uint4*>(gate_up), reinterpret_cast<uint4*>(out));
}

cudaError_t GreedyTokens(int rows, int vocabulary, const Bf16* logits, uint64_t* best,
                         uint32_t* done, int32_t* tokens, cudaStream_t stream) {
  if (rows < 1 || rows > 65535 || vocabulary < kVector || vocabulary % kVector != 0) {
    return cudaErrorInvalidValue;
  }
  const int vectors = vocabulary / kVector, each = kArgmaxThreads * kArgmaxVectors;
  return Launch(ArgmaxKernel, dim3((vectors + each - 1) / each, rows), kArgmaxThreads, stream,
                vectors, reinterpret_cast<const uint4*>(logits), best, done, tokens);
}

}  // namespace crumb::models::cuda
