// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/tile.h"
#include "models/cuda/projection_shape.h"

// Products of a few rows with weight matrices that follow one another, as one kernel. Each block
// streams its share of all their weights into shared memory, from before the kernel before has
// ended to the last product and across the places where all blocks wait for one another, so that
// the memory is never idle while a row is normalised or on its way.
namespace crumb::models::cuda {

inline constexpr int kFewRows = 4;

// What becomes of a product p.
enum class ChainOutput : uint8_t {
  kStore,  // y = p, bf16
  kF32,    // y = p, f32
  kAdd,    // y += p, bf16
  kGate,   // y = SiLU(first half of p) * second half, bf16
};

struct ChainProduct {
  int inputs = 32;  // a multiple of 32; where the rows are normalised at most 8,192
  int outputs = 1;  // of w; even for kGate
  ChainOutput output = ChainOutput::kStore;
  float scale = 1.0f;
  const kernels::Bf16* x = nullptr;            // [rows, inputs], 16-byte aligned
  const kernels::Bf16* norm_weight = nullptr;  // [inputs], or null: x as it is, not RMSNorm(x)
  const kernels::Bf16* w = nullptr;            // [outputs, inputs], 16-byte aligned
  void* y = nullptr;                           // [rows, outputs], kGate [rows, outputs / 2]
};

inline constexpr int kChainProductsMax = 4;

struct ProductChain {
  int rows = 1;  // up to kFewRows
  int count = 1;
  float epsilon = 1e-6f;  // of RMSNorm
  // Each reads what the ones before it wrote; none but the first reads what another kernel writes.
  ChainProduct products[kChainProductsMax];
  uint32_t* barrier = nullptr;  // device, zeroed once when allocated; of one chain at a time
};

// Whether the current device can: compute capability 9.0, and rows that fit into shared memory.
bool ServesChain(const ProductChain& chain);

// y = output(scale * norm(x) W') for every product in turn, sums in fp32. Enqueues one kernel of a
// block a multiprocessor: no allocation, no synchronisation, can be captured. It may start while
// the kernel before it in the stream ends, and then reads weights at once: they were not written by
// kernels that have not ended. Blocks wait for one another: what else runs on the device must end
// without this kernel's end. cudaErrorInvalidValue: not served.
cudaError_t MultiplyChain(const ProductChain& chain, cudaStream_t stream);

}  // namespace crumb::models::cuda
