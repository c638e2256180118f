// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/block_gtq.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/status_macros.h"
#include "kernels/bf16.h"

namespace crumb::bench {
namespace {

constexpr uint32_t kRotationSeed = 3;

// Adds |x|^2 of every block to `sums`, for the rows of one head.
void AddEnergies(const kernels::Bf16* rows, int tokens, int64_t stride, int dim, double factor,
                 std::vector<double>& sums) {
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < dim; ++i) {
      const double x = kernels::Bf16ToFloat(rows[t * stride + i]);
      sums[i % (dim / 2)] += factor * x * x;
    }
  }
}

}  // namespace

std::vector<int> AllocateBits(std::span<const double> energy, int budget, int least, int most) {
  std::vector<int> bits(energy.size(), least);
  const auto gain = [&](size_t i) {
    return bits[i] < most ? energy[i] * std::pow(4.0, -bits[i]) : -1.0;
  };
  for (int spent = least * static_cast<int>(energy.size()); spent < budget; ++spent) {
    size_t best = 0;
    for (size_t i = 1; i < energy.size(); ++i) {
      if (gain(i) > gain(best)) best = i;
    }
    ++bits[best];
  }
  return bits;
}

absl::StatusOr<std::vector<std::vector<double>>> BlockEnergies(
    calibration::ActivationSource& source) {
  const calibration::ModelShape& shape = source.shape();
  const int dim = shape.head_dim, group = shape.q_heads / shape.kv_heads;
  std::vector<std::vector<double>> energies(size_t{1} * shape.layers * shape.kv_heads,
                                            std::vector<double>(dim / 2, 0.0));
  CRUMB_RETURN_IF_ERROR(source.ForEach(
      0, shape.layers, [&](const calibration::SequenceActivations& sequence) -> absl::Status {
        for (int head = 0; head < shape.q_heads; ++head) {
          AddEnergies(sequence.q + int64_t{head} * dim, sequence.tokens,
                      int64_t{shape.q_heads} * dim, dim, 0.5 / group,
                      energies[sequence.layer * shape.kv_heads + head / group]);
        }
        for (int head = 0; head < shape.kv_heads; ++head) {
          AddEnergies(sequence.k + int64_t{head} * dim, sequence.tokens,
                      int64_t{shape.kv_heads} * dim, dim, 0.5,
                      energies[sequence.layer * shape.kv_heads + head]);
        }
        return absl::OkStatus();
      }));
  return energies;
}

const std::vector<double>& SphereCodebooks::Of(int dim, int bits) {
  std::vector<double>& levels = levels_[{dim, bits}];
  if (levels.empty()) levels = SphereCodebook(dim, bits);
  return levels;
}

BlockGtq::BlockGtq(const std::vector<int>& block_bits, int value_bits, SphereCodebooks& codebooks) {
  const int blocks = static_cast<int>(block_bits.size());
  for (int bits = 0; bits <= *std::max_element(block_bits.begin(), block_bits.end()); ++bits) {
    RateGroup group{.bits = bits, .channels = {}, .rotation = {}, .levels = {}};
    for (int i = 0; i < blocks; ++i) {
      if (block_bits[i] == bits) group.channels.insert(group.channels.end(), {i, i + blocks});
    }
    if (!group.channels.empty()) key_groups_.push_back(std::move(group));
  }
  RateGroup all{.bits = value_bits, .channels = {}, .rotation = {}, .levels = {}};
  all.channels.resize(2 * blocks);
  std::iota(all.channels.begin(), all.channels.end(), 0);
  value_groups_.push_back(std::move(all));
  for (std::vector<RateGroup>* groups : {&key_groups_, &value_groups_}) {
    for (RateGroup& group : *groups) {
      const int dim = static_cast<int>(group.channels.size());
      group.rotation = RandomOrthogonal(dim, kRotationSeed);
      group.levels = codebooks.Of(dim, group.bits);
    }
  }
}

std::vector<uint8_t> BlockGtq::Encode(kernels::TilePart part, const WindowRows& rows) const {
  BitWriter out;
  for (const RateGroup& group : GroupsOf(part)) {
    const WindowRows own = rows(Eigen::all, group.channels);
    const WindowRows rotated = own * group.rotation;
    for (Eigen::Index row = 0; row < rows.rows(); ++row) {
      const float norm = own.row(row).norm();
      out.AddHalf(norm);
      for (const float value : rotated.row(row)) {
        out.Add(NearestLevel(group.levels, norm > 0.0f ? value / norm : 0.0), group.bits);
      }
    }
  }
  return out.Take();
}

WindowRows BlockGtq::Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                            int tokens) const {
  const std::vector<RateGroup>& groups = GroupsOf(part);
  Eigen::Index dim = 0;
  for (const RateGroup& group : groups) dim += group.rotation.cols();
  WindowRows rows(tokens, dim);
  BitReader in(bytes);
  for (const RateGroup& group : groups) {
    WindowRows rotated(tokens, group.rotation.cols());
    for (int row = 0; row < tokens; ++row) {
      const float norm = in.NextHalf();
      for (float& value : rotated.row(row)) {
        value = static_cast<float>(group.levels[in.Next(group.bits)]);
      }
      const float stored = rotated.row(row).norm();
      rotated.row(row) *= stored > 0.0f ? norm / stored : 0.0f;
    }
    rows(Eigen::all, group.channels) = rotated * group.rotation.transpose();
  }
  return rows;
}

}  // namespace crumb::bench
