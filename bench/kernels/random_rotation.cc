// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "bench/kernels/random_data.h"

namespace crumb::bench {

// A product of Householder reflections: dense, and cheap to make.
std::vector<float> RandomRotation(int dim, std::mt19937& random) {
  std::vector<double> r(static_cast<size_t>(dim) * dim, 0.0);
  for (int i = 0; i < dim; ++i) r[i * dim + i] = 1.0;
  std::normal_distribution<double> normal;
  for (int reflection = 0; reflection < 8; ++reflection) {
    std::vector<double> v(dim);
    for (double& x : v) x = normal(random);
    const double norm = std::inner_product(v.begin(), v.end(), v.begin(), 0.0);
    for (int i = 0; i < dim; ++i) {
      const double dot = std::inner_product(v.begin(), v.end(), r.begin() + i * dim, 0.0);
      for (int j = 0; j < dim; ++j) r[i * dim + j] -= 2.0 * dot / norm * v[j];
    }
  }
  return std::vector<float>(r.begin(), r.end());
}

}  // namespace crumb::bench
