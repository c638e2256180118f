// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/decode/decode_attention.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {

struct SequenceLengths {
  int sink = 0;
  int pages = 0;
  int recent = 0;
};

// One decode call on random data. Every KV head has its own tiles, windows, R and mu.
struct DecodeOptions {
  TileShape tile;
  int kv_heads = 1;
  int group = 1;  // query heads per KV head
  int q_tokens = 1;
  std::vector<SequenceLengths> sequences;
  int max_pages = 0;  // 0: the number that the sequences need
  double logit_std = 1.0;
  double value_std = 1.0;
  bool transforms = true;  // R_K, R_V, mu_v
  bool offset = false;
  bool shift = false;
  bool sink_logit = false;
  float soft_cap = 0.0f;
  int window = 0;
  OutType out_type = OutType::kF32;
  CopyPath copy_path = CopyPath::kAuto;
  bool batch_invariant = false;
  DecodeForm form = DecodeForm::kAuto;
  DeviceLimits limits;
  uint32_t seed = 1;
};

// A key of the history and its logit.
struct DecodeKey {
  int page = 0;
  int token = 0;
  double nats = 0.0;
};

class DecodeCase {
 public:
  explicit DecodeCase(const DecodeOptions& options);

  // Sets one history token's logit to `nats` for the first query head: its K row is constant, as
  // large as the sum of that query's elements requires. REQUIRES: no transforms.
  void PeakAt(int sequence, int page, int head, int token, double nats);
  // Replaces query elements by their signs, which 16 bits hold exactly before any rotation.
  void LevelQuery();
  // Makes the history's logits grow from token to token, from 0 to `nats`, for the first query
  // head. REQUIRES: no transforms.
  void Rise(int sequence, int head, double nats);
  // Makes the query rows of a KV head nearly alike (row i is the first one times 1 + i / 64) and
  // their logits over the history small, except those of `keys`, which have the given logits for
  // the first row. The last key gets a v_scale that, multiplied by its probability, falls between
  // two fp16 numbers if the probability of the key before it is 1. REQUIRES: no transforms.
  void Dominate(int sequence, int head, const std::vector<DecodeKey>& keys);
  void PoisonOutputs();
  // Sets the lengths on the device; pages and windows beyond them stay as they are.
  void SetLengths(const std::vector<SequenceLengths>& sequences);

  DecodeAttentionParams Params();
  DecodeTuning Tuning() const { return {options_.form, options_.copy_path, options_.limits}; }
  // Poisons the outputs, plans and attends, and waits.
  void Run();
  cudaError_t Enqueue(cudaStream_t stream);

  // Return the outputs of the last run, [batch, q_tokens, q_heads, head_dim] and [batch, q_tokens,
  // q_heads].
  std::vector<float> Out() const;
  std::vector<float> Lse() const { return lse_.Download<float>(); }
  std::vector<uint8_t> OutBytes() const { return out_.Download<uint8_t>(); }

  // Returns the largest ||out - oracle|| / ||oracle|| of at most `rows_max` rows, spread evenly.
  double WorstError(int rows_max = 1 << 20) const;

  // Returns the largest error as a multiple of the allowed error: `bound`, or the error of rounding
  // the oracle's row to the output type if that is larger.
  double WorstOfBound(double bound, int rows_max = 1 << 20) const;

  // Returns the host's copy of a page tile, which tests change and upload again.
  uint8_t* Tile(int sequence, int page, int head);

  const DecodeOptions& options() const { return options_; }
  int q_heads() const { return options_.kv_heads * options_.group; }

 private:
  void MakePages();
  void MakeWindows();
  void MakeTransforms();
  AttentionParams HostParams(int sequence) const;
  // Calls `visit(error, rounding)` for rows spread evenly: ||out - oracle|| / ||oracle||, and the
  // same of the oracle rounded to the output's type.
  template <typename Visit>
  void VisitErrors(int rows_max, const Visit& visit) const;
  // Gives a key a logit of about `key.nats` for query q, by codes that follow q. Returns the exact
  // logit.
  double PlaceKey(const std::vector<float>& q, const DecodeKey& key, uint8_t* tile) const;
  void ScaleKeys(int sequence, int page, int head, int token, double nats);

  DecodeOptions options_;
  int batch_;
  int recent_capacity_ = 1;
  int position_blocks_ = 1;
  std::mt19937 random_;
  std::vector<SequenceLengths> lengths_;

  std::vector<uint8_t> arena_host_;
  std::vector<uint64_t> page_offset_;  // [batch, max_pages] bytes into the arena
  std::vector<Bf16> q_host_, sink_host_, recent_host_;
  std::vector<int32_t> recent_begin_;
  std::vector<float> rotation_k_, rotation_v_, mean_v_, offset_host_, shift_host_, sink_logit_;

  DeviceBuffer arena_, table_, q_, sink_, recent_, sink_address_, recent_address_;
  DeviceBuffer sink_tokens_, pages_, recent_tokens_, begin_;
  DeviceBuffer device_rotation_k_, device_rotation_v_, device_mean_, device_offset_, device_shift_,
      device_sink_logit_;
  DeviceBuffer out_, lse_, plan_, workspace_;
};

// Returns whether the device and the sizes allow the form.
bool Serves(DecodeForm form, const TileShape& tile, int query_rows);

}  // namespace crumb::kernels::cuda
