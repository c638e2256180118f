// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/window_codecs.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>

#include "calibration/eigenbasis.h"

namespace crumb::bench {

void EncodeGroup(const Eigen::Ref<const Eigen::VectorXf>& group, int bits, BitWriter& out) {
  const float most = static_cast<float>((1 << bits) - 1);
  const float scale = out.AddHalf((group.maxCoeff() - group.minCoeff()) / most);
  const float minimum = out.AddHalf(group.minCoeff());
  for (const float value : group) {
    const float steps = scale > 0.0f ? (value - minimum) / scale : 0.0f;
    out.Add(static_cast<uint32_t>(std::clamp(std::round(steps), 0.0f, most)), bits);
  }
}

void DecodeGroup(int bits, BitReader& in, Eigen::Ref<Eigen::VectorXf> group) {
  const float scale = in.NextHalf();
  const float minimum = in.NextHalf();
  for (float& value : group) value = minimum + scale * static_cast<float>(in.Next(bits));
}

namespace {

constexpr int kInt4Bits = 4;
constexpr Eigen::Index kInt4Group = 128;

}  // namespace

Int4Hadamard::Int4Hadamard(int head_dim)
    : hadamard_(calibration::HadamardMatrix(head_dim).cast<float>()) {}

std::vector<uint8_t> Int4Hadamard::Encode(kernels::TilePart, const WindowRows& rows) const {
  BitWriter out;
  const WindowRows rotated = rows * hadamard_;
  const Eigen::Index group = std::min(kInt4Group, rotated.cols());
  for (Eigen::Index row = 0; row < rotated.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < rotated.cols(); begin += group) {
      EncodeGroup(rotated.row(row).segment(begin, group).transpose(), kInt4Bits, out);
    }
  }
  return out.Take();
}

WindowRows Int4Hadamard::Decode(kernels::TilePart, const std::vector<uint8_t>& bytes,
                                int tokens) const {
  WindowRows rotated(tokens, hadamard_.cols());
  BitReader in(bytes);
  const Eigen::Index group = std::min(kInt4Group, rotated.cols());
  for (Eigen::Index row = 0; row < rotated.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < rotated.cols(); begin += group) {
      Eigen::VectorXf values(group);
      DecodeGroup(kInt4Bits, in, values);
      rotated.row(row).segment(begin, group) = values.transpose();
    }
  }
  return rotated * hadamard_;
}

namespace {

constexpr int kKiviBits = 2;
constexpr int kKiviGroup = 64;

// Calls visit(line, begin, count) for every group; a line is a channel of K or a token of V.
template <typename Visit>
void ForGroups(kernels::TilePart part, int tokens, int dim, const Visit& visit) {
  const bool keys = part == kernels::TilePart::kKey;
  const int lines = keys ? dim : tokens, length = keys ? tokens : dim;
  for (int line = 0; line < lines; ++line) {
    for (int begin = 0; begin < length; begin += kKiviGroup) {
      visit(line, begin, std::min(kKiviGroup, length - begin));
    }
  }
}

}  // namespace

std::vector<uint8_t> Kivi::Encode(kernels::TilePart part, const WindowRows& rows) const {
  BitWriter out;
  const int tokens = static_cast<int>(rows.rows());
  ForGroups(part, tokens, head_dim_, [&](int line, int begin, int count) {
    Eigen::VectorXf group(count);
    if (part == kernels::TilePart::kKey) {
      group = rows.col(line).segment(begin, count);
    } else {
      group = rows.row(line).segment(begin, count).transpose();
    }
    EncodeGroup(group, kKiviBits, out);
  });
  return out.Take();
}

WindowRows Kivi::Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                        int tokens) const {
  WindowRows rows(tokens, head_dim_);
  BitReader in(bytes);
  ForGroups(part, tokens, head_dim_, [&](int line, int begin, int count) {
    Eigen::VectorXf group(count);
    DecodeGroup(kKiviBits, in, group);
    if (part == kernels::TilePart::kKey) {
      rows.col(line).segment(begin, count) = group;
    } else {
      rows.row(line).segment(begin, count) = group.transpose();
    }
  });
  return rows;
}

namespace {

constexpr int kTurboBits = 3;
constexpr int kGridPoints = 1 << 15;
constexpr int kLloydRounds = 2000;
constexpr double kLloydTolerance = 1e-10;

WindowRows GaussianMatrix(int dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  WindowRows matrix(dim, dim);
  for (Eigen::Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = normal(random);
  return matrix;
}

}  // namespace

WindowRows RandomOrthogonal(int dim, uint32_t seed) {
  const Eigen::MatrixXd gaussian = GaussianMatrix(dim, seed).cast<double>();
  const Eigen::HouseholderQR<Eigen::MatrixXd> qr(gaussian);
  Eigen::MatrixXd q = qr.householderQ();
  for (int j = 0; j < dim; ++j) {
    if (qr.matrixQR()(j, j) < 0) q.col(j) = -q.col(j);
  }
  return q.cast<float>();
}

uint32_t NearestLevel(const std::vector<double>& levels, double value) {
  uint32_t best = 0;
  for (uint32_t i = 1; i < levels.size(); ++i) {
    if (std::abs(value - levels[i]) < std::abs(value - levels[best])) best = i;
  }
  return best;
}

std::vector<double> SphereCodebook(int dim, int bits) {
  std::vector<double> point(kGridPoints), weight(kGridPoints);
  for (int i = 0; i < kGridPoints; ++i) {
    point[i] = -1.0 + (2.0 * i + 1.0) / kGridPoints;
    weight[i] = std::pow(1.0 - point[i] * point[i], (dim - 3) / 2.0);
  }
  const int count = 1 << bits;
  std::vector<double> levels(count);
  const double reach = std::min(1.0, 2 / std::sqrt(dim));
  for (int i = 0; i < count; ++i) levels[i] = (2.0 * i + 1.0 - count) / count * reach;
  for (int round = 0; round < kLloydRounds; ++round) {
    std::vector<double> sum(count, 0.0), mass(count, 0.0);
    int level = 0;
    for (int i = 0; i < kGridPoints; ++i) {
      while (level + 1 < count && point[i] > (levels[level] + levels[level + 1]) / 2) ++level;
      sum[level] += weight[i] * point[i];
      mass[level] += weight[i];
    }
    double moved = 0.0;
    for (int i = 0; i < count; ++i) {
      const double next = mass[i] > 0 ? sum[i] / mass[i] : levels[i];
      moved = std::max(moved, std::abs(next - levels[i]));
      levels[i] = next;
    }
    if (moved < kLloydTolerance) break;
  }
  return levels;
}

namespace {

int BitsOf(const std::vector<double>& levels) {
  return levels.size() == 8 ? kTurboBits : kTurboBits - 1;
}

}  // namespace

TurboQuant::TurboQuant(int head_dim, Keys keys)
    : keys_(keys),
      rotation_(RandomOrthogonal(head_dim, 1)),
      projection_(GaussianMatrix(head_dim, 2)),
      codebook_(SphereCodebook(head_dim, kTurboBits)),
      product_codebook_(SphereCodebook(head_dim, kTurboBits - 1)) {}

std::vector<uint8_t> TurboQuant::Encode(kernels::TilePart part, const WindowRows& rows) const {
  const bool product = Product(part);
  const std::vector<double>& levels = product ? product_codebook_ : codebook_;
  const WindowRows turned = rows * rotation_;
  WindowRows residual(rows.rows(), rows.cols());  // residuals of rotated directions
  BitWriter codes;
  for (Eigen::Index row = 0; row < rows.rows(); ++row) {
    const float norm = rows.row(row).norm();
    codes.AddHalf(norm);
    for (Eigen::Index i = 0; i < rows.cols(); ++i) {
      const float direction = norm > 0 ? turned(row, i) / norm : 0.0f;
      const uint32_t code = NearestLevel(levels, direction);
      codes.Add(code, BitsOf(levels));
      residual(row, i) = direction - static_cast<float>(levels[code]);
    }
  }
  if (!product) return codes.Take();
  const WindowRows signs = residual * rotation_.transpose() * projection_.transpose();
  for (Eigen::Index row = 0; row < rows.rows(); ++row) {
    codes.AddHalf(residual.row(row).norm());
    for (Eigen::Index i = 0; i < rows.cols(); ++i) codes.Add(signs(row, i) >= 0.0f, 1);
  }
  return codes.Take();
}

WindowRows TurboQuant::Decode(kernels::TilePart part, const std::vector<uint8_t>& bytes,
                              int tokens) const {
  const bool product = Product(part);
  const std::vector<double>& levels = product ? product_codebook_ : codebook_;
  const Eigen::Index dim = rotation_.cols();
  BitReader in(bytes);
  WindowRows turned(tokens, dim);
  Eigen::VectorXf norms(tokens);
  for (int row = 0; row < tokens; ++row) {
    norms[row] = in.NextHalf();
    for (Eigen::Index i = 0; i < dim; ++i) {
      turned(row, i) = static_cast<float>(levels[in.Next(BitsOf(levels))]);
    }
  }
  WindowRows directions = turned * rotation_.transpose();
  if (product) {
    const float factor =
        static_cast<float>(std::sqrt(std::numbers::pi / 2) / static_cast<double>(dim));
    WindowRows signs(tokens, dim);
    for (int row = 0; row < tokens; ++row) {
      const float scale = in.NextHalf() * factor;
      for (Eigen::Index i = 0; i < dim; ++i) signs(row, i) = in.Next(1) == 1 ? scale : -scale;
    }
    directions += signs * projection_;
  }
  return norms.asDiagonal() * directions;
}

}  // namespace crumb::bench
