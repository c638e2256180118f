// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "kernels/quantize.h"

namespace crumb::kernels {

// Errors that quantization causes in a window, as ratios of Euclidean norms; 0 is exact.
struct WindowError {
  float attention = 0.0f;
  float key = 0.0f;
  float value = 0.0f;
};

// Compares the exact rows of a window of one (layer, KV head) with its tile.
//
// The attention error is ||o' - o|| / ||o|| over all queries together, where o is the attention
// output over this window alone with its exact rows and o' the same with the tile. The key and
// value errors are ||x' - x|| / ||x|| over every eighth row, where x is a row and x' the row that
// the tile stands for.
//
// `window` is the argument of the QuantizeTile call that wrote the tile; `queries` [n, head_dim]
// are queries of heads that read this KV head, in the model's basis; `scale` is the factor of q.k;
// soft_cap > 0 caps logits as cap * tanh(logit / cap).
//
// Allocates work memory, and blocks for about n * head_dim^2 * 3 operations.
WindowError MeasureWindow(const QuantizeParams& window, std::span<const float> queries, float scale,
                          float soft_cap);

}  // namespace crumb::kernels
