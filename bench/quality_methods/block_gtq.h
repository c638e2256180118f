// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/quality_methods/window_codecs.h"
#include "calibration/activation_source.h"

namespace crumb::bench {

// Distributes `budget` bits over blocks so that the sum of energy * 4^-bits is least, with `least`
// to `most` bits per block: the next bit always goes to the block whose term falls most, of equal
// ones to the first. REQUIRES: the budget lies between the bounds' sums.
std::vector<int> AllocateBits(std::span<const double> energy, int budget, int least, int most);

// Returns, for each (layer, KV head), the energy of every RoPE block, which is the pair of channels
// i and i + head_dim / 2: half of the mean of |q|^2 over tokens and the group's query heads plus
// that of |k|^2. [layers * kv_heads] vectors of head_dim / 2. Errors of the source are returned.
absl::StatusOr<std::vector<std::vector<double>>> BlockEnergies(
    calibration::ActivationSource& source);

// SphereCodebook of each size once, because one takes a tenth of a second. Not thread-safe.
class SphereCodebooks {
 public:
  const std::vector<double>& Of(int dim, int bits);

 private:
  std::map<std::pair<int, int>, std::vector<double>> levels_;
};

// Block-GTQ (Liang et al., 2026, arXiv 2606.24033) of one (layer, KV head). Keys: each RoPE block
// has its own number of bits per channel. Blocks of equal bits form a rate group, which is stored
// as its norm (fp16) and a direction, rotated by a random orthogonal matrix and rounded to the best
// levels of the sphere (TurboQuant's MSE form); a decoded direction is scaled to norm 1. Values
// are one such group of all channels.
class BlockGtq : public WindowCodec {
 public:
  // `block_bits` are the bits of blocks i, that is of channels i and i + size. `codebooks` are only
  // used by the constructor.
  BlockGtq(const std::vector<int>& block_bits, int value_bits, SphereCodebooks& codebooks);
  std::vector<uint8_t> Encode(kernels::TilePart part, const WindowRows& rows) const override;
  WindowRows Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                    int tokens) const override;

 private:
  struct RateGroup {
    int bits = 0;
    std::vector<int> channels;
    WindowRows rotation;
    std::vector<double> levels;
  };
  const std::vector<RateGroup>& GroupsOf(kernels::TilePart part) const {
    return part == kernels::TilePart::kKey ? key_groups_ : value_groups_;
  }

  std::vector<RateGroup> key_groups_;    // bits ascending
  std::vector<RateGroup> value_groups_;  // one
};

}  // namespace crumb::bench
