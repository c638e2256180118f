// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/bf16.h"

namespace crumb::kernels {

// Random data of one test. The seed is printed once; CRUMB_TEST_SEED repeats a run.
class RandomData {
 public:
  RandomData() : RandomData(ProcessSeed()) {}
  explicit RandomData(uint32_t seed) : random_(seed) {}

  float Normal(float deviation = 1.0f) { return deviation * normal_(random_); }
  int Below(int bound) { return static_cast<int>(random_() % bound); }

  std::vector<Bf16> Rows(size_t count, float deviation = 1.0f) {
    std::vector<Bf16> rows(count);
    for (Bf16& x : rows) x = Bf16FromFloat(Normal(deviation));
    return rows;
  }
  std::vector<float> Floats(size_t count, float deviation = 1.0f) {
    std::vector<float> values(count);
    for (float& x : values) x = Normal(deviation);
    return values;
  }
  // Orthogonal dim x dim: a product of three random reflections.
  std::vector<float> Orthogonal(int dim) {
    std::vector<double> matrix(static_cast<size_t>(dim) * dim, 0.0);
    for (int i = 0; i < dim; ++i) matrix[i * dim + i] = 1.0;
    for (int round = 0; round < 3; ++round) Reflect(dim, &matrix);
    return std::vector<float>(matrix.begin(), matrix.end());
  }

 private:
  static uint32_t ProcessSeed() {
    static const uint32_t seed = [] {
      const char* fixed = std::getenv("CRUMB_TEST_SEED");
      const uint32_t value =
          fixed != nullptr ? static_cast<uint32_t>(std::stoul(fixed)) : std::random_device()();
      std::cout << "CRUMB_TEST_SEED=" << value << std::endl;
      return value;
    }();
    return seed;
  }

  // Replaces matrix by matrix (I - 2 w w' / w'w).
  void Reflect(int dim, std::vector<double>* matrix) {
    std::vector<double> w(dim);
    double norm = 0.0;
    for (double& x : w) {
      x = Normal();
      norm += x * x;
    }
    for (int i = 0; i < dim; ++i) {
      double dot = 0.0;
      for (int j = 0; j < dim; ++j) dot += (*matrix)[i * dim + j] * w[j];
      for (int j = 0; j < dim; ++j) (*matrix)[i * dim + j] -= 2.0 * dot * w[j] / norm;
    }
  }

  std::mt19937 random_;
  std::normal_distribution<float> normal_;
};

}  // namespace crumb::kernels
