// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "kernels/quantize.h"

namespace crumb::kernels {

// What quantization did to a window. Ratios of Euclidean norms; 0: exact.
struct WindowError {
  float attention = 0.0f;
  float key = 0.0f;
  float value = 0.0f;
};

// Compares the exact rows of a window of one (layer, KV head) with its tile. Attention error:
// ||o' - o|| / ||o|| over all queries together, o the attention output over this window alone with
// its exact rows, o' the same from the tile. Key and value error: ||y' - y|| / ||x|| over every
// eighth row, x a row, y its rotated and centred form and y' what the tile holds of that.
// `window`       what QuantizeTile was called with; the tile is written
// `queries`      [n, head_dim] of query heads that read this KV head, model basis
// `scale`        of q.k; `soft_cap` > 0: cap * tanh(logit / cap)
// Allocates work memory; blocks for about n * head_dim^2 * 3
// operations.
WindowError MeasureWindow(const QuantizeParams& window, std::span<const float> queries, float scale,
                          float soft_cap);

}  // namespace crumb::kernels
