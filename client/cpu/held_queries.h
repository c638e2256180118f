// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/bf16.h"

namespace crumb::client {

// HeldQueries keeps the queries of a sequence's latest tokens, per layer, for the quality watch.
// Not thread-safe.
//
// The watch measures with the latest queries, because those of the evicted window's own time are
// gone. Memory is allocated by the first Hold: layers x 4 tokens x row x 2 bytes.
class HeldQueries {
 public:
  static constexpr int kTokens = 4;

  // `row` is the number of elements in one token's queries of all heads.
  HeldQueries(int layers, int row) : row_(row), held_(layers, 0) {}

  // Keeps the last kTokens of the `tokens` rows of one layer. q [tokens, row]
  void Hold(int layer, int tokens, const kernels::Bf16* q) {
    if (rows_.empty()) rows_.resize(held_.size() * kTokens * row_);
    const int kept = std::min(tokens, kTokens);
    std::copy_n(q + static_cast<size_t>(tokens - kept) * row_, static_cast<size_t>(kept) * row_,
                rows_.begin() + static_cast<size_t>(layer) * kTokens * row_);
    held_[layer] = kept;
  }

  // Returns whether queries of the layer are kept.
  bool Has(int layer) const { return held_[layer] > 0; }

  // Returns the kept queries of query heads [head_begin, head_end), of `dim` elements each:
  // [tokens, heads, dim].
  std::vector<float> Take(int layer, int head_begin, int head_end, int dim) const {
    std::vector<float> out;
    for (int t = 0; t < held_[layer]; ++t) {
      const size_t token = (static_cast<size_t>(layer) * kTokens + t) * row_;
      for (int i = head_begin * dim; i < head_end * dim; ++i) {
        out.push_back(kernels::Bf16ToFloat(rows_[token + i]));
      }
    }
    return out;
  }

 private:
  int row_;
  std::vector<int> held_;            // number of kept rows per layer
  std::vector<kernels::Bf16> rows_;  // [layers, kTokens, row]
};

}  // namespace crumb::client
