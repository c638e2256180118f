// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace crumb::models {

// The model's unnormalised scores of the next token, one row per position, and functions of them.
struct Logits {
  int rows = 0;
  int vocab_size = 0;
  std::vector<float> values;  // [rows, vocab_size]

  std::span<const float> row(int i) const {
    return {values.data() + static_cast<size_t>(i) * vocab_size, static_cast<size_t>(vocab_size)};
  }
  std::span<const float> last() const { return row(rows - 1); }
};

// Returns the most likely next token: the index of the largest of `logits`, the lowest one if
// several are equal. A NaN is never chosen if there is a number. REQUIRES: `logits` is not empty.
int32_t GreedyToken(std::span<const float> logits);

// Returns the Kullback-Leibler divergence KL(softmax(reference) || softmax(other)) in nats,
// computed in double precision and at least 0. REQUIRES: both rows have the same size, above 0.
double KlDivergence(std::span<const float> reference, std::span<const float> other);

struct LogitAgreement {
  int rows = 0;
  double mean_kl = 0.0;  // nats per row
  double max_kl = 0.0;
  double top1 = 0.0;  // fraction of rows whose most likely tokens agree, 0 to 1
};

// Compares two passes of one model row by row. REQUIRES: rows and vocab_size are equal. All members
// are zero if there are no rows.
LogitAgreement CompareLogits(const Logits& reference, const Logits& other);

}  // namespace crumb::models
