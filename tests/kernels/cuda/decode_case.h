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

// One decode call on random data; every head has its own tiles, windows, R and mu.
struct DecodeOptions {
  TileShape tile;
  int kv_heads = 1;
  int group = 1;  // query heads per KV head
  int q_tokens = 1;
  std::vector<SequenceLengths> sequences;
  int max_pages = 0;  // 0: what the sequences need
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

// A key of the history, and its logit.
struct DecodeKey {
  int page = 0;
  int token = 0;
  double nats = 0.0;
};

class DecodeCase {
 public:
  explicit DecodeCase(const DecodeOptions& options);

  // Makes one history token's logit `nats` for the first query head: a K row that is constant, as
  // large as that query's sum of elements asks for. Without transforms.
  void PeakAt(int sequence, int page, int head, int token, double nats);
  // Query elements keep their signs alone: 16 bits hold them exactly, before any rotation.
  void LevelQuery();
  // Makes the history's logits grow from token to token, from 0 to `nats` for the first query head.
  // Without transforms.
  void Rise(int sequence, int head, double nats);
  // Makes the rows of a KV head nearly alike (row i is the first one times 1 + i / 64), what its
  // history says to them small, and `keys` such that say as much as they should to the first row.
  // The last one gets a v_scale that falls between two fp16 numbers when it is multiplied by its
  // probability, if that is 1 at the key before. Without transforms.
  void Dominate(int sequence, int head, const std::vector<DecodeKey>& keys);
  void PoisonOutputs();
  // Sets the lengths on the device; pages and windows beyond them stay as they are.
  void SetLengths(const std::vector<SequenceLengths>& sequences);

  DecodeAttentionParams Params();
  DecodeTuning Tuning() const { return {options_.form, options_.copy_path, options_.limits}; }
  // Plans and attends on `stream`; outputs are poisoned first. Then waits.
  void Run();
  cudaError_t Enqueue(cudaStream_t stream);

  // Outputs of the last run, [batch, q_tokens, q_heads, head_dim] and [batch, q_tokens, q_heads].
  std::vector<float> Out() const;
  std::vector<float> Lse() const { return lse_.Download<float>(); }
  std::vector<uint8_t> OutBytes() const { return out_.Download<uint8_t>(); }

  // Largest ||out - oracle|| / ||oracle|| over rows; at most `rows_max` rows, spread evenly.
  double WorstError(int rows_max = 1 << 20) const;

  // The largest error as a multiple of what the output type allows: `bound`, or what rounding the
  // oracle's row to the type alone takes, where that is more.
  double WorstOfBound(double bound, int rows_max = 1 << 20) const;

  // The host's copy of a page tile, to change and upload again.
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
  // Makes a key say about `key.nats` to query q, by codes that follow q. Returns what it says.
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

}  // namespace crumb::kernels::cuda
