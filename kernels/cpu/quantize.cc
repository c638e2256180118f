// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/quantize.h"

#include "kernels/cpu/kernel_table.h"

namespace crumb::kernels {

std::string_view MethodName(Method method) {
  switch (method) {
    case Method::kOscar:
      return "oscar";
    case Method::kCrumb:
      return "crumb";
    case Method::kHadamard:
      return "hadamard";
    case Method::kNaive:
      return "naive";
  }
  return "unknown";
}

std::optional<Method> MethodNamed(std::string_view name) {
  for (const Method method : {Method::kOscar, Method::kCrumb, Method::kHadamard, Method::kNaive}) {
    if (name == MethodName(method)) return method;
  }
  return std::nullopt;
}

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
