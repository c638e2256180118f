// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/cpu/recent_rows.h"
#include "client/cpu/scratch_pool.h"
#include "client/worker/page.h"
#include "crumb/counters.h"
#include "crumb/worker_options.h"
#include "kernels/attention.h"
#include "kernels/quantize.h"

namespace crumb::client {

// BF16 rows of one layer. The row of KV head h and token t lies at h * head_stride + t *
// token_stride, in elements; a ring wraps t around.
struct LayerRows {
  const kernels::Bf16* k = nullptr;
  const kernels::Bf16* v = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

// The inputs and output of attention of one layer. The fresh tokens attend sink_tokens rows of
// `sink`, then all `pages`, then recent_tokens rows of the ring `recent`, of which the last
// q_tokens are their own.
//
// Everything is borrowed for the duration of the call. Query head h reads KV head h / (q_heads /
// kv_heads). The tokens' causal order is that of their rows: fresh token i attends the recent rows
// up to its own.
struct AttentionCall {
  int layer = 0;
  int q_tokens = 0;
  const kernels::Bf16* q = nullptr;  // [q_tokens, q_heads, head_dim]
  float* out = nullptr;              // [q_tokens, q_heads, head_dim]
  LayerRows sink;
  int sink_tokens = 0;
  std::span<const uint64_t> pages;  // address of each page's first tile of this layer
  kernels::PageFormat history_format = kernels::PageFormat::kInt2;
  LayerRows recent;
  int recent_begin = 0;     // the ring's slot of the oldest recent token
  int recent_capacity = 0;  // slots of the ring
  int recent_tokens = 0;
};

// The exact BF16 rows of one (layer, KV head) of a window.
struct WindowRows {
  const kernels::Bf16* k = nullptr;
  const kernels::Bf16* v = nullptr;
  int64_t stride = 0;  // elements between rows
};

// CpuBackend stores windows as pages and computes attention on the CPU, distributing the work with
// WorkerOptions::parallel_for. Thread-safe.
//
// Constants (rotations, means, sink logits) are expanded when it is created. Attention of one layer
// is divided into tasks of one KV head and up to 64 query tokens; storing a window into tasks of
// one (layer, KV head). Which kernels run (AVX-512, AVX2, portable) is decided by the CPU, see
// docs/kernels/cpu.md.
class CpuBackend {
 public:
  // `options` is borrowed.
  explicit CpuBackend(const WorkerOptions& options);

  // Fills the tiles of layers [layer_begin, layer_end) of `page`, which covers positions
  // [position, position + 64), from `rows`. Returns kernels::kStatus bits of all tiles together.
  uint32_t StoreWindow(const RecentRows& rows, int position, int layer_begin, int layer_end,
                       const Page& page) const;

  // Fills the tile of one (layer, KV head) of `page`, whose position is set, from `rows`, whose
  // stride is head_dim. Returns kernels::kStatus bits.
  uint32_t StoreTile(const WindowRows& rows, int layer, int head, const Page& page) const;

  // Fills the tiles of all KV heads of one layer of `page`. `rows_of` returns the rows of a head.
  uint32_t StoreTiles(const std::function<WindowRows(int head)>& rows_of, int layer,
                      const Page& page) const;

  // Dequantizes the tile of one (layer, KV head) of `page` to rows in the model's basis: the values
  // that a kernel attending the page uses, rounded to BF16. k, v out [64, head_dim].
  void ReadTile(const Page& page, int layer, int head, kernels::Bf16* k, kernels::Bf16* v) const;

  // Returns the errors that storing the window at `position` caused in one (layer, KV head).
  // REQUIRES: `page` has the window's tiles, and `rows` still has its exact rows, which are finite.
  // queries [n, head_dim] of query heads that read this KV head.
  QualitySample Measure(const RecentRows& rows, int position, int layer, int head, const Page& page,
                        std::span<const float> queries) const;

  // Does the same for rows and a tile anywhere in memory.
  QualitySample Measure(const WindowRows& rows, int position, int layer, int head, std::byte* tile,
                        std::span<const float> queries) const;

  // Computes attention. kResourceExhausted: there is no work memory.
  absl::Status Attend(const AttentionCall& call) const;

 private:
  // Runs body(0) to body(count - 1) with the engine's parallel_for, or one after the other without
  // one.
  void Parallel(int count, const std::function<void(int)>& body) const;
  // Returns the rows of the window at `position`, which lie in the ring without a gap.
  static WindowRows RowsOf(const RecentRows& rows, int position, int layer, int head);
  // Returns the parameters with which one tile is quantized, dequantized or measured: the
  // rotations, means, clips and feedback of its (layer, KV head).
  kernels::QuantizeParams TileParams(const WindowRows& rows, int position, int layer, int head,
                                     std::byte* tile) const;
  uint32_t StoreTile(const WindowRows& rows, int position, int layer, int head,
                     const Page& page) const;
  // Returns the kernel's parameters that all tasks of a call have in common.
  kernels::AttentionParams ParamsOf(const AttentionCall& call) const;
  // Returns the index of the block of positions whose key means were subtracted from the history
  // page at `position`.
  int PositionBlock(int position) const;
  // Returns q . mu_k for the query rows of one KV head, which stored keys lack because their mean
  // was subtracted: [q_tokens, q_heads, position_blocks]. Empty if keys have no means.
  std::vector<float> OffsetsOf(const AttentionCall& call, int kv_head,
                               const kernels::AttentionParams& params) const;

  const WorkerOptions& options_;
  const std::vector<std::shared_ptr<const RotationSet::Layer>> layers_;
  const std::vector<float> sink_logits_;  // [layers, q_heads], or empty
  mutable ScratchPool scratch_;
};

// Returns false if a value is NaN or infinite.
bool AllFinite(const kernels::Bf16* values, size_t count);

}  // namespace crumb::client
