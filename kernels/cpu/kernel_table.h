// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cpu/scratch.h"
#include "kernels/quantize.h"

// The kernels of one instruction set. One source file fills each table and is compiled with that
// set's flags; everything else is compiled for the baseline machine.
namespace crumb::kernels {

struct KernelTable {
  uint32_t (*quantize_tile)(const QuantizeParams& params);
  void (*dequantize_tile)(const TileShape& shape, const uint8_t* tile, float* k, float* v);
  // Replaces `count` rows [count, head_dim] by (row + mean) R', in place. REQUIRES: count is a
  // multiple of 8.
  void (*rows_to_model)(const RowTransform& transform, int head_dim, int count, float* rows);
  // Computes attention for the rows of one KV head that `scratch` has room for.
  void (*attend_rows)(const AttentionParams& params, const RowBlock& block,
                      const AttendScratch& scratch);
};

const KernelTable& PortableKernels();
#if defined(__x86_64__)
const KernelTable& Avx2Kernels();
const KernelTable& Avx512Kernels();
const KernelTable& Avx512VnniKernels();
#endif

// Returns the table of ActiveCpuIsa().
const KernelTable& ActiveKernels();

}  // namespace crumb::kernels
