// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/prefill/prefill_attention.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {

// Returns the allowed relative error of a row at logits of this standard deviation. Rows where
// rounding to BF16 alone costs more are allowed 1.1 times that (WorstOfBound).
inline double PrefillErrorBound(OutType type, double logit_std) {
  if (type == OutType::kF32) return logit_std < 4 ? 5e-4 : 2e-3;
  return logit_std < 4 ? 2.5e-3 : 5e-3;
}

struct ChunkLengths {
  int sink = 0;
  int pages = 0;
  int recent = 0;
  int fresh = 0;
};

// One prefill call on random data. Every KV head has its own tiles, windows, R and mu.
struct PrefillOptions {
  TileShape tile;
  int kv_heads = 2;
  int group = 4;  // query heads per KV head
  std::vector<ChunkLengths> sequences;
  double logit_std = 1.0;
  double value_std = 1.0;
  bool transforms = true;  // R_K, R_V, mu_v
  bool offset = false;
  bool shift = false;
  bool sink_logit = false;
  float soft_cap = 0.0f;
  int window = 0;
  OutType out_type = OutType::kF32;
  PrefillMma mma = PrefillMma::kAuto;
  uint32_t seed = 1;
};

class PrefillCase {
 public:
  explicit PrefillCase(const PrefillOptions& options);

  PrefillAttentionParams Params() const;
  // Poisons the outputs, attends and waits.
  void Run();

  std::vector<float> Out() const;
  std::vector<float> Lse() const { return lse_.Download<float>(); }
  std::vector<uint8_t> OutBytes() const { return out_.Download<uint8_t>(); }

  // Returns the largest ||out - oracle|| / ||oracle|| of at most `rows_max` rows, spread evenly,
  // the first and last among them.
  double WorstError(int rows_max) const;
  // Returns the largest error as a multiple of the allowed error: `bound`, or 1.1 times the error
  // of rounding the oracle's row to the type of `out` if that is larger.
  double WorstOfBound(double bound, int rows_max) const;
  // Returns ||out - oracle|| / ||oracle|| of one row.
  double RowError(int row, const std::vector<float>& out, const std::vector<float>& lse) const;

  // Host copies, which tests change before Upload.
  std::vector<Bf16>& q() { return q_host_; }
  uint8_t* Tile(int sequence, int page, int head);
  void Upload();

  int q_heads() const { return o_.kv_heads * o_.group; }
  int rows() const { return tokens_ * q_heads(); }

 private:
  void MakePages();
  void MakeRows();
  void MakeTransforms();
  AttentionParams HostParams(int sequence, std::vector<uint64_t>* pages,
                             std::vector<Bf16>* recent) const;
  struct RowErrors {
    double all, rounding;  // relative errors: of `out`, and of the oracle's row rounded to its type
  };
  RowErrors ErrorsOf(int row, const std::vector<float>& out, const std::vector<float>& lse) const;
  void VisitErrors(int rows_max, const std::function<void(const RowErrors&)>& visit) const;

  PrefillOptions o_;
  int batch_;
  int tokens_ = 0;  // fresh tokens of all sequences
  int max_pages_ = 1;
  int fresh_max_ = 1;
  int recent_capacity_ = 1;
  int position_blocks_ = 1;
  std::mt19937 random_;

  std::vector<uint8_t> arena_host_;
  std::vector<size_t> page_offset_;  // [batch, max_pages] bytes into the arena
  std::vector<Bf16> q_host_, k_host_, v_host_, sink_host_, recent_host_;
  std::vector<int32_t> recent_begin_, fresh_begin_;
  std::vector<float> rotation_k_, rotation_v_, mean_v_, offset_host_, shift_host_, sink_logit_;

  DeviceBuffer arena_, table_, q_, k_, v_, sink_, recent_, sink_address_, recent_address_;
  DeviceBuffer lengths_[6];
  DeviceBuffer device_rotation_k_, device_rotation_v_, device_mean_, device_offset_, device_shift_,
      device_sink_logit_;
  DeviceBuffer out_, lse_;
};

}  // namespace crumb::kernels::cuda
