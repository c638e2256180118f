// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/scratch.h"

#include <algorithm>

namespace crumb::kernels {
namespace {

// Allocates 64-byte aligned arrays one after the other.
class Arrays {
 public:
  explicit Arrays(void* base) : base_(static_cast<uint8_t*>(base)) {}

  template <typename T>
  void Place(size_t count, T** out) {
    *out = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace

int TokensPerBlock(const AttentionParams& params) {
  const int heads = params.q_heads / params.kv_heads;
  return std::clamp(kRowsPerBlock / heads, 1, std::max(params.q_tokens, 1));
}

size_t LayOutScratch(const AttentionParams& params, void* base, AttendScratch* scratch) {
  const TileShape& shape = params.shape;
  const size_t d = shape.head_dim, tokens = shape.tokens, groups = shape.groups();
  const size_t rows =
      static_cast<size_t>(TokensPerBlock(params)) * (params.q_heads / params.kv_heads);
  AttendScratch& s = *scratch;
  s.score_stride = std::max(shape.tokens, kBf16PieceTokens);
  // A group of 32 channels shares its quads with its neighbour; each has the other's q set to zero.
  s.quad_slots = shape.group_size == 32 ? shape.head_dim / 2 : shape.head_dim / 4;
  s.weight_groups = shape.group_size == 32 ? shape.groups() / 2 : shape.groups();

  Arrays arrays(base);
  arrays.Place(rows * d, &s.q);
  arrays.Place(rows * d, &s.q_bf16);
  arrays.Place(rows * d, &s.q_rotated);
  arrays.Place(rows * s.quad_slots * 4, &s.q_high);
  arrays.Place(rows * s.quad_slots * 4, &s.q_low);
  arrays.Place(rows, &s.q_unit);
  arrays.Place(rows * groups, &s.q_sum);
  arrays.Place(rows * s.score_stride, &s.scores);
  arrays.Place(rows, &s.rescale);
  arrays.Place(rows * s.weight_groups * tokens * 2, &s.p_high);
  arrays.Place(rows * s.weight_groups * tokens * 2, &s.p_low);
  arrays.Place(rows * s.weight_groups, &s.p_unit);
  arrays.Place(tokens * d, &s.k_panel);
  arrays.Place(tokens * d, &s.v_panel);
  arrays.Place(8 * 16, &s.units);
  arrays.Place(2 * groups * tokens, &s.meta);
  for (float** meta : {&s.k_scale, &s.k_minimum, &s.v_scale, &s.v_minimum}) {
    arrays.Place(groups * tokens, meta);
  }
  for (PartialSoftmax* partial : {&s.bf16, &s.int2}) {
    arrays.Place(rows, &partial->running_max);
    arrays.Place(rows, &partial->sum);
    arrays.Place(rows * d, &partial->out);
  }
  arrays.Place(rows * groups, &s.minimum_sum);
  return arrays.used();
}

}  // namespace crumb::kernels
