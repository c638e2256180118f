// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"

// The kernels' definitions in double precision, one scalar at a time: the oracle of tests and
// benchmarks. It is written for clarity and not for speed.
namespace crumb::kernels::reference {

// Returns minimum + scale * code of one element of a tile.
double Dequantize(const TileShape& shape, const uint8_t* tile, TilePart part, int token,
                  int channel);

// One row of a K or V half as the method `oscar` defines it, in double precision.
struct Row {
  bool finite = true;
  std::vector<double> y;        // [head_dim] rotated and centred, not clipped
  std::vector<double> scale;    // [groups] before rounding to fp16
  std::vector<double> minimum;  // [groups]
  std::vector<double> steps;    // [head_dim] (clipped y - minimum) / scale, before rounding
};

Row QuantizeRow(const TileShape& shape, const Bf16* x, const RowTransform& transform);

// One row as the method `crumb` defines it. `codes` [head_dim] are those of the row under test: the
// steps of a channel follow from the codes before it, so that a difference in one tie does not hide
// later ones. If null, the row's own codes are used, rounded from the steps.
struct FeedbackRow {
  bool finite = true;
  bool clipped = true;          // false: the ratio reached 2 and the row was quantized without clip
  std::vector<double> scale;    // [groups] times the inner-product ratio, before rounding to fp16
  std::vector<double> minimum;  // [groups] times the inner-product ratio, before rounding to fp16
  std::vector<double> steps;    // [head_dim] (target - minimum) / scale, before rounding
  double ratio = 1.0;
};

FeedbackRow QuantizeFeedbackRow(const TileShape& shape, const Bf16* x,
                                const RowTransform& transform, const uint8_t* codes);

// Output and log-sum-exp of one (query token, query head).
struct AttentionRow {
  std::vector<double> out;  // [head_dim]
  double lse = 0.0;
};

// Attends position by position. Reads the pages' bytes through tile_codec.h.
AttentionRow Attend(const AttentionParams& params, int q_token, int q_head);

}  // namespace crumb::kernels::reference
