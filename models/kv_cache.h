// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/tile.h"
#include "models/config.h"
#include "models/thread_pool.h"

namespace crumb::models {

// The keys and values of one sequence. In a forward pass, the engine calls Append and then Attend
// for every layer, and Advance once at the end. Not thread-safe.
class KvCache {
 public:
  virtual ~KvCache() = default;

  // The number of tokens whose keys and values are held, which is the position of the next token.
  virtual int length() const = 0;

  // Adds the fresh tokens' rows of one layer, which are copied.
  //   k, v  [tokens, kv_heads, head_dim] after QK-norm and RoPE
  virtual absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                              const kernels::Bf16* v) = 0;

  // Computes causal attention of the fresh tokens over all held tokens, including the fresh ones,
  // with scale 1 / sqrt(head_dim).
  //   q    [tokens, q_heads, head_dim]
  //   out  [tokens, q_heads, head_dim]
  virtual absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) = 0;

  // Ends the forward pass: from now on `tokens` are part of the sequence.
  virtual absl::Status Advance(std::span<const int32_t> tokens) = 0;
};

// All keys and values of one sequence in BF16 with exact attention: the reference with which
// compressed caches are compared. It shares no attention code with kernels/. Not thread-safe; its
// loops run on the pool. A copy is an independent sequence with the same beginning.
class DenseKvCache : public KvCache {
 public:
  // `pool` must outlive the cache.
  DenseKvCache(const ModelConfig& config, ThreadPool& pool);

  int length() const override { return length_; }
  // kInvalidArgument: no such layer, or no tokens.
  absl::Status Append(int layer, int tokens, const kernels::Bf16* k,
                      const kernels::Bf16* v) override;
  // kFailedPrecondition: fewer tokens were appended to the layer than `tokens` needs.
  absl::Status Attend(int layer, int tokens, const kernels::Bf16* q, float* out) override;
  // kFailedPrecondition: a layer lacks the tokens' rows.
  absl::Status Advance(std::span<const int32_t> tokens) override;

  // Returns the rows of one layer and KV head, [rows held, head_dim].
  std::span<const kernels::Bf16> keys(int layer, int kv_head) const;
  std::span<const kernels::Bf16> values(int layer, int kv_head) const;

 private:
  struct Rows {
    std::vector<kernels::Bf16> k;
    std::vector<kernels::Bf16> v;
  };
  // The arguments and buffers that the tasks of one Attend share.
  struct Job;

  // Returns the rows of one layer and KV head.
  Rows& rows(int layer, int kv_head) { return rows_[layer * kv_heads_ + kv_head]; }
  const Rows& rows(int layer, int kv_head) const { return rows_[layer * kv_heads_ + kv_head]; }
  // Returns the number of tokens whose rows the layer has, those of the pass included.
  int TokensHeld(int layer) const;
  // Attends up to four query tokens, for which K and V are read as they are stored.
  void AttendFew(const Job& job, int kv_head) const;
  // Attends many query tokens: K and V are converted to f32 once, then blocks of 16 tokens run on
  // the pool (AttendBlock).
  void AttendMany(const Job& job, int kv_head, std::vector<float>& k_panels,
                  std::vector<float>& v_rows) const;
  void AttendBlock(const Job& job, int kv_head, int begin, const std::vector<float>& k_panels,
                   const std::vector<float>& v_rows) const;

  const int layers_;
  const int q_heads_;
  const int kv_heads_;
  const int head_dim_;
  ThreadPool& pool_;
  std::vector<Rows> rows_;  // [layers, kv_heads]
  int length_ = 0;
};

}  // namespace crumb::models
