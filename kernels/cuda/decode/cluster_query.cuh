// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/cluster_memory.cuh"

// Rotation of the query in a cluster: each block computes a slice of q' and sends it to all blocks.
namespace crumb::kernels::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The block's slice of q' = q R_K. Each warp multiplies 16 input channels by 8 output channels at a
// time; R_K is split into two bf16 parts as in QueryRotation.
template <class T>
class SliceRotation {
 public:
  __device__ __forceinline__ SliceRotation(const DecodeKernelParams& k, const ClusterPlace& place,
                                           const ClusterMemory<T>& memory)
      : k_(k),
        place_(place),
        rows_(RowsOf<T>(k)),
        stage_(memory.shared + memory.at.rotation + threadIdx.x / 32 * kStageBytes) {}

  // Start loading the factors. They are requested before tiles, because loads complete in the order
  // of issue. Staged through shared memory, they do not delay registers that are loaded earlier.
  __device__ __forceinline__ void PrefetchMatrix() {
    if (!Takes() || !RotatesKeys<T>(k_)) return;
    if constexpr (T::kStaged) {
      CopyMatrix();
    } else {
      LoadMatrix(Matrix(), T::kDim);
    }
  }
  __device__ __forceinline__ void PrefetchQuery() {
    if (!Takes()) return;
    if constexpr (T::kStaged) {
      CopyQuery();
    } else {
      LoadQuery();
    }
  }

  __device__ __forceinline__ void Multiply(float* query_parts) {
    if (!Takes()) return;
    if constexpr (T::kStaged) {
      ptx::WaitCopies<0>();
      __syncwarp();
      LoadStagedQuery();
      if (RotatesKeys<T>(k_)) {
        LoadMatrix(reinterpret_cast<const float*>(stage_), kFactorStride / 4);
      }
    }
    if (!RotatesKeys<T>(k_)) SetIdentity();
    const int row = threadIdx.x % 32 / 4;
    float* to = query_parts + ((Step() * T::kRows + row) << place_.slice_log2);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if (32 * quad >= place_.slice()) break;
      float acc[4][4] = {};
      // A slice of fewer than 32 channels has one or two tiles.
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < 2 || place_.slice() >= 32) MultiplyTile(matrix_[quad][e], acc[e]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row + 8 * i < T::kRows) Keep(acc, i, quad, to + (8 * i << place_.slice_log2));
      }
    }
  }

  // Sums the partial products of the slice and stores it to all blocks. REQUIRES: the block's first
  // `warps` warps call it.
  __device__ __forceinline__ void Send(const ClusterMemory<T>& memory, int warps) const {
    const int quads_log2 = place_.slice_log2 - 2;
    const float* query_parts = memory.Floats(memory.at.query_parts);
    for (int i = threadIdx.x; i < T::kRows << quads_log2; i += 32 * warps) {
      const int row = i >> quads_log2, channel = 4 * (i & ((1 << quads_log2) - 1));
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) {
        const float4 x = *reinterpret_cast<const float4*>(
            query_parts + ((step * T::kRows + row) << place_.slice_log2) + channel);
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
  static constexpr uint32_t kStageBytes = FactorBytes(T::kRows);
  static constexpr int kQuads = T::kDim / 64;  // groups of 32 channels in the largest slice
  static_assert(T::kSteps <= ClusterMemory<T>::kWarps);
  static_assert(!T::kStaged || T::kFastPath);

  __device__ static __forceinline__ int Step() { return threadIdx.x / 32; }
  __device__ static __forceinline__ bool Takes() { return threadIdx.x < 32 * T::kSteps; }

  // Address of the first element of the warp's 16 rows and the slice's channels of R_K.
  __device__ __forceinline__ const float* Matrix() const {
    return k_.p.rotation_k + (static_cast<int64_t>(place_.head) * T::kDim + 16 * Step()) * T::kDim +
           (place_.rank << place_.slice_log2);
  }
  __device__ __forceinline__ void CopyMatrix() const {
    const float* matrix = Matrix();
    const int pieces_log2 = place_.slice_log2 - 2;  // 16-byte pieces of a row
    const int lane = threadIdx.x % 32, piece = lane & ((1 << pieces_log2) - 1);
    const uint32_t to = ptx::SharedAddress(stage_) + 16 * piece;
#pragma unroll 1
    for (int row = lane >> pieces_log2; row < 16; row += 32 >> pieces_log2) {
      ptx::CopyAsync16(to + row * kFactorStride, matrix + row * T::kDim + 4 * piece);
    }
    ptx::CommitCopies();
  }
  // Two pieces of 16 bytes are 16 channels of a query row.
  __device__ __forceinline__ void CopyQuery() const {
    const int lane = threadIdx.x % 32, row = lane / 2;
    if (row < rows_.count) {
      ptx::CopyAsync16(
          ptx::SharedAddress(stage_) + 16 * kFactorStride + kQueryPiece * row + lane % 2 * 16,
          static_cast<const Bf16*>(k_.p.q) +
              rows_.IndexOf(k_, place_.sequence, place_.head, row) * T::kDim + 16 * Step() +
              lane % 2 * 8);
    }
    ptx::CommitCopies();
  }
  __device__ __forceinline__ void LoadStagedQuery() {
    const uint32_t* query = reinterpret_cast<const uint32_t*>(stage_ + 16 * kFactorStride);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + i * 8;
      const bool exists = 8 * i < T::kRows && row < rows_.count;
      query_[i] = exists ? query[row * (kQueryPiece / 4) + lane % 4] : 0;
      query_[i + 2] = exists ? query[row * (kQueryPiece / 4) + lane % 4 + 4] : 0;
    }
  }

  // Row of R_K of element i of a lane's operand: 16 step + 2 c + {0, 1, 8, 9}.
  __device__ static __forceinline__ int MatrixRow(int i) {
    return Step() * 16 + threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8;
  }
  // Loads the operand from `from`, where the warp's rows and channels begin.
  __device__ __forceinline__ void LoadMatrix(const float* from, int stride) {
    from += threadIdx.x % 4 * 2 * stride;
    if (place_.slice() >= 32) {
      LoadQuads(from + threadIdx.x % 32 / 4 * 4, stride);
    } else {
      LoadSingles(from + threadIdx.x % 32 / 4, stride);
    }
  }
  // Tile e of a quad holds channels 32 quad + 4 n + e, where n is the MMA's column.
  __device__ __forceinline__ void LoadQuads(const float* matrix, int stride) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if (32 * quad >= place_.slice()) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 x =
            *reinterpret_cast<const float4*>(matrix + (i % 2 + i / 2 * 8) * stride + 32 * quad);
        matrix_[quad][0][i] = x.x, matrix_[quad][1][i] = x.y;
        matrix_[quad][2][i] = x.z, matrix_[quad][3][i] = x.w;
      }
    }
  }
  // Tile e holds channels 8 e + n.
  __device__ __forceinline__ void LoadSingles(const float* matrix, int stride) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * e >= place_.slice()) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        matrix_[0][e][i] = matrix[(i % 2 + i / 2 * 8) * stride + 8 * e];
      }
    }
  }
  __device__ __forceinline__ void SetIdentity() {
    const int n = threadIdx.x % 32 / 4;
    const int first = place_.rank << place_.slice_log2;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = first + (place_.slice() >= 32 ? 32 * quad + 4 * n + e : 8 * e + n);
#pragma unroll
        for (int i = 0; i < 4; ++i) matrix_[quad][e][i] = MatrixRow(i) == column ? 1.0f : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void LoadQuery() {
    const int lane = threadIdx.x % 32, step = Step();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + i * 8;
      query_[i] = query_[i + 2] = 0;
      if (8 * i < T::kRows && row < rows_.count) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(
                                   static_cast<const Bf16*>(k_.p.q) +
                                   rows_.IndexOf(k_, place_.sequence, place_.head, row) * T::kDim) +
                               8 * step + lane % 4;
        query_[i] = from[0];
        query_[i + 2] = from[4];
      }
    }
  }

  __device__ __forceinline__ void MultiplyTile(const float (&matrix)[4], float (&acc)[4]) const {
    uint32_t high[2], rest[2];
    ptx::SplitBf16(matrix[0], matrix[1], &high[0], &rest[0]);
    ptx::SplitBf16(matrix[2], matrix[3], &high[1], &rest[1]);
    ptx::MmaBf16(acc, query_, high[0], high[1]);
    ptx::MmaBf16(acc, query_, rest[0], rest[1]);
  }

  // Stores row i's elements of a quad, or of two tiles.
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
  char* const stage_;
  float matrix_[kQuads][4][4];
  uint32_t query_[4];
};

#endif

}  // namespace crumb::kernels::cuda
