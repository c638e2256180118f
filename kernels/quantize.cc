// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/quantize.h"

#include "kernels/cpu/kernel_table.h"

namespace crumb::kernels {

uint32_t QuantizeTile(const QuantizeParams& params) {
  return ActiveKernels().quantize_tile(params);
}

void DequantizeTile(const TileShape& shape, const uint8_t* tile, float* k, float* v) {
  ActiveKernels().dequantize_tile(shape, tile, k, v);
}

void DequantizeTileToModel(const TileShape& shape, const uint8_t* tile,
                           const RowTransform& k_transform, const RowTransform& v_transform,
                           float* k, float* v) {
  const KernelTable& kernels = ActiveKernels();
  kernels.dequantize_tile(shape, tile, k, v);
  if (k != nullptr) kernels.rows_to_model(k_transform, shape.head_dim, shape.tokens, k);
  if (v != nullptr) kernels.rows_to_model(v_transform, shape.head_dim, shape.tokens, v);
}

}  // namespace crumb::kernels
