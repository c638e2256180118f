// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <cstdint>
#include <vector>

#include "bench/quality_methods/window_codecs.h"

namespace crumb::bench {

// Scales of the rows and columns of a tile: tile(i, j) / (row[i] column[j]) has rows and columns of
// nearly equal standard deviation.
struct TileScales {
  Eigen::VectorXf row;
  Eigen::VectorXf column;
};

// Divides columns and rows by their standard deviations in turn, 16 times, and returns the scales
// of the round in which the ratios of the largest to the smallest deviation, of columns plus of
// rows, were least.
TileScales BalanceVariance(const WindowRows& tile);

// KVarN (Müller et al., 2026, arXiv 2606.03458) with 2 bits for keys and for values. Tiles of 128
// tokens are rotated by a Hadamard matrix and balanced as above. Keys are then rounded to nearest
// between minimum and maximum per channel over the tile's tokens, values per token over channels.
// The scale along the rounded line is part of its step and minimum, so that a tile stores fp16
// step and minimum per line and one fp16 scale for each position along the lines: 2.375 bits per
// element at head_dim 128. Nothing is calibrated.
class Kvarn : public WindowCodec {
 public:
  explicit Kvarn(int head_dim);  // REQUIRES: head_dim is a power of two
  int window_tokens() const override { return 128; }
  // The bytes are the positions' scales, then the lines.
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  const WindowRows hadamard_;  // symmetric, so it is its inverse
};

}  // namespace crumb::bench
