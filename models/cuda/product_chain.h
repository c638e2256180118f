// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/tile.h"

// Products of a few rows with weight matrices: one at a time, or several that follow one another.
namespace crumb::models::cuda {

// The type of the elements of y.
enum class ProjectionOutput : uint8_t { kBf16, kF32 };

struct ProjectionShape {
  int rows = 1;     // rows of x and y
  int inputs = 1;   // a multiple of 8
  int outputs = 1;  // a multiple of 8
  ProjectionOutput output = ProjectionOutput::kBf16;
  friend bool operator==(const ProjectionShape&, const ProjectionShape&) = default;
};

// Rows of x up to which products are faster by the kernels below than by cuBLAS.
inline constexpr int kFewRows = 4;

// A chain of products of a few rows with weight matrices, computed by one kernel. In decode, a
// product of few rows takes the time of reading its weights. One kernel per product leaves the
// memory idle between products; a chain streams the weights of all its products without a pause,
// from before the previous kernel has ended, while rows are normalised and blocks wait for one
// another. models/cuda/chain_stream.cuh describes the schedule.

// The use of a product p.
enum class ChainOutput : uint8_t {
  kStore,  // y = p, bf16
  kF32,    // y = p, f32
  kAdd,    // y += p, bf16
  kGate,   // y = SiLU(first half of p) * second half, bf16
};

struct ChainProduct {
  int inputs = 32;  // a multiple of 32; at most 8,192 if the rows are normalised
  int outputs = 1;  // rows of w; even for kGate
  ChainOutput output = ChainOutput::kStore;
  float scale = 1.0f;
  const kernels::Bf16* x = nullptr;            // [rows, inputs], 16-byte aligned
  const kernels::Bf16* norm_weight = nullptr;  // [inputs], or null: x is not normalised
  const kernels::Bf16* w = nullptr;            // [outputs, inputs], 16-byte aligned
  void* y = nullptr;                           // [rows, outputs], kGate [rows, outputs / 2]
};

// Products of a chain: those of a layer without its attention.
inline constexpr int kChainProductsMax = 4;

struct ProductChain {
  int rows = 1;  // up to kFewRows
  int count = 1;
  float epsilon = 1e-6f;  // epsilon of RMSNorm
  // A product reads outputs of previous products; only the first may read those of other kernels.
  ChainProduct products[kChainProductsMax];
  uint32_t* barrier = nullptr;  // device; zeroed when allocated; used by one chain at a time
};

// Returns whether the current device serves the chain: it has compute capability 9.0, and the rows
// fit into shared memory.
bool ServesChain(const ProductChain& chain);

// Enqueues one kernel that computes y = output(scale * norm(x) W') for every product in order, with
// sums in fp32. It allocates nothing, does not synchronise, and can be captured. It has one block
// per multiprocessor and may start before the previous kernel in the stream has ended. REQUIRES:
// that kernel does not write weights of the chain, and other work on the device ends without
// waiting for this kernel, because its blocks wait for one another. cudaErrorInvalidValue: the
// chain is not served.
cudaError_t MultiplyChain(const ProductChain& chain, cudaStream_t stream);

// Enqueues one kernel that computes y = scale * x W' for 1 to kFewRows rows of x and reads W once,
// as a stream. It issues its first loads of weights before the previous kernel has ended, allocates
// nothing, does not synchronise, and can be captured. cudaErrorInvalidValue: the sizes are not
// supported.
//   x  device [rows, inputs]
//   w  device [outputs, inputs]
//   y  device [rows, outputs] of shape.output
cudaError_t FewRowsProduct(const ProjectionShape& shape, float scale, const kernels::Bf16* x,
                           const kernels::Bf16* w, void* y, cudaStream_t stream);

}  // namespace crumb::models::cuda
