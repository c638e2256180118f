// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace crumb::models {

// The model's unnormalised scores of the next token, one row per position.
struct Logits {
  int rows = 0;
  int vocab_size = 0;
  std::vector<float> values;  // [rows, vocab_size]

  std::span<const float> row(int i) const {
    return {values.data() + static_cast<size_t>(i) * vocab_size, static_cast<size_t>(vocab_size)};
  }
  std::span<const float> last() const { return row(rows - 1); }
};

}  // namespace crumb::models
