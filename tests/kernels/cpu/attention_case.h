// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/quantize.h"
#include "tests/kernels/random_data.h"

namespace crumb::kernels {

// Sizes and features of a random attention problem.
struct AttentionSizes {
  TileShape shape;
  PageFormat format = PageFormat::kInt2;
  int q_tokens = 1;
  int kv_heads = 2;
  int heads = 2;  // query heads per KV head
  int sink_tokens = 20;
  int pages = 2;
  int recent_tokens = 40;
  int recent_capacity = 100;
  int recent_begin = 70;   // wraps round
  bool transforms = true;  // rotations, means, offsets and shifts
  bool sink_logit = false;
  float soft_cap = 0.0f;
  int window = 0;
  float key_deviation = 1.0f;
};

// A random attention problem with all its memory: every head has data, rotations, means, offsets
// and shifts of its own.
class AttentionCase {
 public:
  AttentionCase(const AttentionSizes& sizes, RandomData* random);
  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  AttentionParams params;
  std::vector<Bf16> q, sink_k, sink_v, recent_k, recent_v;
  std::vector<float> out, lse;
  std::vector<float> rotation_k, rotation_v, mean_k, mean_v, offset, shift, sink_logit;

  // Runs the kernel in a workspace of exactly AttentionWorkspaceBytes and checks that nothing
  // beyond it was written.
  void Run();

  // Runs the kernel and compares every row with the reference: the relative error of the output
  // and the absolute error of the log-sum-exp stay below `tolerance`.
  void ExpectMatchesReference(double tolerance = 5e-4);

  uint8_t* Tile(int page, int head);

 private:
  void MakeWindows(const AttentionSizes& sizes, RandomData* random);
  void MakeTransforms(const AttentionSizes& sizes, RandomData* random);
  void MakePages(const AttentionSizes& sizes, RandomData* random);

  std::vector<std::vector<uint8_t>> pages_;  // include room to align the first tile
  std::vector<uint64_t> page_address_;
};

}  // namespace crumb::kernels
