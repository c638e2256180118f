// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "kernels/cuda/decode/decode_tuning.h"
#include "kernels/tile.h"

// Times decode attention as one graph of kLayers calls on as many layers' tiles and windows, with
// pages at permuted addresses and with sink 64 and recent 287 tokens. Rotations, merges and the
// plan are included.
namespace crumb::bench {

struct DecodeWorkload {
  std::string name;
  int q_heads = 32;
  int kv_heads = 8;
  int q_tokens = 1;
  std::vector<int> contexts;  // tokens of each sequence
  kernels::TileShape tile;
  bool overlap = false;  // each call may start while the previous one ends
  bool ampere = false;   // 16-byte copies instead of bulk copies
  bool batch_invariant = false;
  bool offsets = false;  // logits have offsets of kPositionBlocks position blocks
  kernels::cuda::DecodeForm form = kernels::cuda::DecodeForm::kAuto;
  double target_us = 0.0;  // target time; 0: none
};

struct DecodeResult {
  double us = 0.0;         // time of one layer
  double bytes = 0.0;      // bytes that one layer moves
  double rel_error = 0.0;  // largest error of the checked rows
};

// The memory of the workloads, which run one after the other in it.
class DecodeBench {
 public:
  // Allocates memory for the largest of `workloads`.
  explicit DecodeBench(const std::vector<DecodeWorkload>& workloads);
  ~DecodeBench();
  DecodeBench(const DecodeBench&) = delete;
  DecodeBench& operator=(const DecodeBench&) = delete;

  // Returns whether the current device and the kernels support the workload.
  static bool Supported(const DecodeWorkload& workload);
  // Times a workload and compares some rows with the CPU's.
  DecodeResult Run(const DecodeWorkload& workload);

  // Returns the memory of pages, in which the device's rates are measured, too.
  void* arena() const { return arena_; }
  size_t arena_bytes() const { return arena_bytes_; }

 private:
  uint8_t* arena_ = nullptr;  // page slots: all layers of a page, tiles of one layer together
  size_t arena_bytes_ = 0;
  kernels::Bf16* windows_ = nullptr;
  size_t window_bytes_ = 0;
};

// Returns the workloads that crumb-kernel-bench runs, in order.
std::vector<DecodeWorkload> StandardDecodeWorkloads();

}  // namespace crumb::bench
