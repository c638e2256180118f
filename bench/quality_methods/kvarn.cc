// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/kvarn.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "calibration/eigenbasis.h"

namespace crumb::bench {
namespace {

constexpr int kKvarnBits = 2;
constexpr int kBalanceRounds = 16;  // the paper's number
// Bounds of a scale's logarithm, far outside those of real tiles: a constant line has no deviation.
constexpr float kLogScaleMax = 10.0f;

// Returns the standard deviation of every column.
Eigen::RowVectorXf Deviations(const WindowRows& tile) {
  const WindowRows centred = tile.rowwise() - tile.colwise().mean();
  return (centred.colwise().squaredNorm() / static_cast<float>(tile.rows())).cwiseSqrt();
}

float Ratio(const Eigen::RowVectorXf& deviations) {
  const float least = std::max(deviations.minCoeff(), std::numeric_limits<float>::min());
  return deviations.maxCoeff() / least;
}

void AddLogarithms(const Eigen::RowVectorXf& deviations, Eigen::VectorXf& logs) {
  for (Eigen::Index i = 0; i < logs.size(); ++i) {
    const float deviation = std::max(deviations[i], std::numeric_limits<float>::min());
    logs[i] = std::clamp(logs[i] + std::log(deviation), -kLogScaleMax, kLogScaleMax);
  }
}

}  // namespace

TileScales BalanceVariance(const WindowRows& tile) {
  Eigen::VectorXf row = Eigen::VectorXf::Zero(tile.rows());
  Eigen::VectorXf column = Eigen::VectorXf::Zero(tile.cols());
  const auto balanced = [&]() -> WindowRows {
    return (-row.array()).exp().matrix().asDiagonal() * tile *
           (-column.array()).exp().matrix().asDiagonal();
  };
  TileScales best;
  float least = std::numeric_limits<float>::infinity();
  for (int round = 0; round < kBalanceRounds; ++round) {
    AddLogarithms(Deviations(balanced()), column);
    AddLogarithms(Deviations(balanced().transpose()), row);
    const WindowRows now = balanced();
    const float imbalance = Ratio(Deviations(now)) + Ratio(Deviations(now.transpose()));
    if (round > 0 && imbalance >= least) continue;
    least = imbalance;
    best = {.row = row.array().exp(), .column = column.array().exp()};
  }
  return best;
}

Kvarn::Kvarn(int head_dim) : hadamard_(calibration::HadamardMatrix(head_dim).cast<float>()) {}

std::vector<uint8_t> Kvarn::Encode(kernels::TilePart part, const WindowRows& rows) const {
  WindowRows tile = rows * hadamard_;
  if (part == kernels::TilePart::kKey) tile.transposeInPlace();
  const TileScales scales = BalanceVariance(tile);
  BitWriter out;
  for (Eigen::Index j = 0; j < tile.cols(); ++j) {
    const float stored = out.AddHalf(scales.column[j]);
    tile.col(j) /= stored > 0.0f ? stored : 1.0f;
  }
  for (Eigen::Index i = 0; i < tile.rows(); ++i)
    EncodeGroup(tile.row(i).transpose(), kKvarnBits, out);
  return out.Take();
}

WindowRows Kvarn::Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                         int tokens) const {
  const bool keys = part == kernels::TilePart::kKey;
  const Eigen::Index dim = hadamard_.cols();
  WindowRows tile(keys ? dim : tokens, keys ? tokens : dim);
  BitReader in(bytes);
  Eigen::RowVectorXf scales(tile.cols());
  for (float& scale : scales) scale = in.NextHalf();
  for (Eigen::Index i = 0; i < tile.rows(); ++i) {
    Eigen::VectorXf line(tile.cols());
    DecodeGroup(kKvarnBits, in, line);
    tile.row(i) = line.transpose().cwiseProduct(scales);
  }
  if (keys) tile.transposeInPlace();
  return tile * hadamard_;
}

}  // namespace crumb::bench
