// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <random>
#include <vector>

#include "bench/quality_methods/window_codecs.h"
#include "calibration/activation_source.h"
#include "kernels/bf16.h"

// Rows and activations from random numbers.
namespace crumb::bench {

inline WindowRows NormalRows(int tokens, int dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  WindowRows rows(tokens, dim);
  for (Eigen::Index i = 0; i < rows.size(); ++i) rows.data()[i] = normal(random);
  return rows;
}

// Rows from memory: layer l's are scaled by l + 1, and channel 3 of keys has an offset.
class FakeSource : public calibration::ActivationSource {
 public:
  FakeSource(int sequences, int tokens) : sequences_(sequences), tokens_(tokens) {
    shape_.layers = 2;
    shape_.q_heads = 4;
    shape_.kv_heads = 2;
    shape_.head_dim = 8;
  }
  const calibration::ModelShape& shape() const override { return shape_; }
  int layers_per_walk() const override { return 2; }
  int64_t visits() const override { return 2 * sequences_; }
  absl::Status ForEach(int first, int count, const Visitor& visit) override {
    for (int s = 0; s < sequences_; ++s) {
      for (int layer = first; layer < first + count; ++layer) {
        const std::vector<kernels::Bf16> q = Rows(4, 10 + s, layer, 0.0f),
                                         k = Rows(2, 20 + s, layer, 5.0f),
                                         v = Rows(2, 30 + s, layer, 0.0f);
        const absl::Status status =
            visit({.layer = layer, .tokens = tokens_, .q = q.data(), .k = k.data(), .v = v.data()});
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

 private:
  std::vector<kernels::Bf16> Rows(int heads, uint32_t seed, int layer, float offset) const {
    const WindowRows rows = NormalRows(tokens_, heads * 8, seed);
    std::vector<kernels::Bf16> out(rows.size());
    for (size_t i = 0; i < out.size(); ++i) {
      const float scaled = rows.data()[i] * static_cast<float>(layer + 1);
      out[i] = kernels::Bf16FromFloat(scaled + (i % 8 == 3 ? offset : 0.0f));
    }
    return out;
  }

  calibration::ModelShape shape_;
  const int sequences_, tokens_;
};

}  // namespace crumb::bench
