// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/bf16.h"

// Returns rows of bf16 in double precision.
namespace crumb::models::cuda {

inline constexpr double kBf16Step = 1.0 / 256;  // twice the largest relative rounding of bf16

inline double Value(kernels::Bf16 x) { return kernels::Bf16ToFloat(x); }

// Expects rows within bf16's rounding of each other; `noise` bounds the error of intermediate
// rounding.
inline void ExpectClose(const std::vector<kernels::Bf16>& found,
                        const std::vector<double>& expected, double noise) {
  ASSERT_EQ(found.size(), expected.size());
  int wrong = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double bound = std::abs(expected[i]) * kBf16Step + noise;
    if (!(std::abs(Value(found[i]) - expected[i]) <= bound) && ++wrong < 5) {
      ADD_FAILURE() << "element " << i << ": " << Value(found[i]) << ", not " << expected[i];
    }
  }
  EXPECT_EQ(wrong, 0);
}

inline std::vector<double> Normalized(const kernels::Bf16* row, const kernels::Bf16* weight,
                                      int count, double epsilon) {
  double square = 0;
  for (int i = 0; i < count; ++i) square += Value(row[i]) * Value(row[i]);
  const double factor = 1 / std::sqrt(square / count + epsilon);
  std::vector<double> out;
  for (int i = 0; i < count; ++i) out.push_back(Value(row[i]) * factor * Value(weight[i]));
  return out;
}

}  // namespace crumb::models::cuda
