// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/random_inputs.h"

#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/tile_codec.h"

namespace crumb::kernels::cuda {

std::vector<Bf16> RandomRows(size_t count, double deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, static_cast<float>(deviation));
  std::vector<Bf16> rows(count);
  for (Bf16& x : rows) x = Bf16FromFloat(normal(random));
  return rows;
}

std::vector<float> RandomFloats(size_t count, double deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, static_cast<float>(deviation));
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

uint16_t Half(double x) {
  bool saturated = false;
  return Fp16FromFloat(static_cast<float>(x), &saturated);
}

void RandomTile(const TileShape& shape, double k_std, double v_std, std::mt19937& random,
                uint8_t* tile) {
  const size_t code_bytes = 2 * shape.code_bytes();
  for (size_t i = 0; i < code_bytes; i += 4) {
    const uint32_t word = random();
    std::memcpy(tile + i, &word, 4);
  }
  std::uniform_real_distribution<double> spread(0.6, 1.2), shift(-0.2, 0.2);
  for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
    const double deviation = part == TilePart::kKey ? k_std : v_std;
    for (int t = 0; t < shape.tokens; ++t) {
      for (int y = 0; y < shape.groups(); ++y) {
        const double scale = spread(random) * deviation;
        WriteMeta(shape, part, t, y, {Half(scale), Half(-1.5 * scale + shift(random) * deviation)},
                  tile);
      }
    }
  }
}

std::vector<float> RandomRotation(int dim, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<double> rows(static_cast<size_t>(dim) * dim);
  for (double& x : rows) x = normal(random);
  for (int i = 0; i < dim; ++i) {
    double* row = rows.data() + static_cast<size_t>(i) * dim;
    for (int j = 0; j < i; ++j) {
      const double* other = rows.data() + static_cast<size_t>(j) * dim;
      const double dot = std::inner_product(row, row + dim, other, 0.0);
      for (int c = 0; c < dim; ++c) row[c] -= dot * other[c];
    }
    const double norm = std::sqrt(std::inner_product(row, row + dim, row, 0.0));
    for (int c = 0; c < dim; ++c) row[c] /= norm;
  }
  return std::vector<float>(rows.begin(), rows.end());
}

}  // namespace crumb::kernels::cuda
