// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "crumb/rotation_set.h"
#include "kernels/quantize.h"
#include "kernels/tile.h"

namespace crumb::client {

// The part of a model that one rank of an engine holds. An empty range means all.
struct RankPart {
  IndexRange layers;      // layers of the rank's pages
  IndexRange kv_heads;    // counted in the whole model
  IndexRange q_heads;     // counted in the whole model; they read kv_heads
  bool publishes = true;  // false: another rank publishes the same tiles
  friend bool operator==(const RankPart&, const RankPart&) = default;
};

// The position of a rank in an engine of tp_size * pp_size ranks.
struct RankPlace {
  int tp_rank = 0;
  int tp_size = 1;
  int pp_rank = 0;
  int pp_size = 1;
};

// Returns the part that engines usually give to a rank. Layers are cut into consecutive pipeline
// stages of equal size; if they do not divide, the first stages have one layer more. Heads are
// divided equally. With more tensor-parallel ranks than KV heads, consecutive ranks hold the same
// KV head and divide its query heads, and the lowest of them publishes. Engines that cut
// differently fill in RankPart themselves. kInvalidArgument: a rank is outside its size, there are
// more stages than layers, or heads do not divide.
absl::StatusOr<RankPart> PartOfRank(const RankPlace& place, int layers, int kv_heads, int q_heads);

// Runs body(0) .. body(count - 1), in any order and on any threads, and returns when all have
// finished. It is called by several threads at once if several sequences compute at once, but never
// from inside a body.
using ParallelFor = std::function<void(int count, const std::function<void(int)>& body)>;

// WorkerOptions configure a Worker. The fields up to `fields` determine which pages are
// interchangeable and become part of the keyspace; the others concern this process only.
//
// Fields that determine tiles must be right, because no check can find a wrong one: a worker that
// names other weights or another RoPE than it uses reads and writes pages that are wrong for it.
// Everything else that is inconsistent is found by Validate.
struct WorkerOptions {
  std::string model;    // a name for people and metrics
  std::string weights;  // digest of the checkpoint, or the engine's weight version
  int layers = 0;
  int kv_heads = 0;
  int q_heads = 0;  // a multiple of kv_heads
  int head_dim = 0;
  int group_size = 128;  // elements with a common scale; at most head_dim
  kernels::PageFormat history_format = kernels::PageFormat::kInt2;
  kernels::Method method = kernels::Method::kOscar;  // how the quantizer chooses INT2 codes
  RotationSet rotations = RotationSet::Identity();
  float clip_k = 0.96f;  // fraction of |k| kept; <= 0: all
  float clip_v = 0.92f;
  // Basis of the V rows that Append takes: "model", or "rotated" if R_V is folded into the weights,
  // in which case `rotations` has no rotation_v.
  std::string v_basis = "model";
  std::string rope;  // effective RoPE configuration, as the engine writes it
  // tokens per prefill block, counted from position 0; a multiple of 64, at least 320
  int prefill_block = 8192;
  std::string tenant;                         // empty: the default tenant
  std::map<std::string, std::string> fields;  // further keyspace fields, such as a LoRA id

  // The part of these layers and heads that this rank holds. Its sequences count layers and heads
  // from 0, and its pages are fragments that ranks of any other degree can read. `rotations` are
  // those of the whole model.
  RankPart part;

  int recent_tokens = 256;  // minimum length of the BF16 window; a multiple of 64
  int draft_slots = 8;      // draft tokens of a decode step: 63 at most, on a GPU 7
  float scale = 0.0f;       // factor of q.k; 0: 1 / sqrt(head_dim)
  float soft_cap = 0.0f;    // > 0: logits become cap * tanh(logit / cap)
  // Sliding windows, [layers] of the whole model: a token of layer i attends the last windows[i]
  // positions, its own included; 0: all positions. Empty: no layer has one. The history of such a
  // layer is stored like any other and not read where the window lies behind it.
  std::vector<int> windows;
  // Learned logits that join each query head's softmax sum and have no value (attention sinks),
  // [layers, q_heads] of the whole model. Empty: there are none.
  std::vector<float> sink_logits;

  size_t page_bytes_max = size_t{16} << 30;  // private memory for pages; Append fails beyond it
  // Capacity, in tokens, of the cache of recent prompts' page keys (4.5 bytes per token). A prompt
  // that shares a prefix with a cached one reuses its keys instead of hashing it again. 0 disables
  // the cache.
  size_t prompt_key_cache_tokens = size_t{1} << 20;
  // Number of pages that take as long to hash as crumbd takes for a request. A prompt with several
  // times as many pages without known keys is acquired in parts, and the keys of the next part are
  // hashed while crumbd works on the present one. 0: every prompt is acquired at once.
  int part_pages = 256;
  size_t publish_queue_max = 1024;  // pages waiting to be published; further ones are dropped
  int publish_batch = 32;           // pages per Reserve and Commit
  Duration publish_deadline = std::chrono::seconds(2);       // limit of one Reserve or Commit
  Duration begin_deadline = std::chrono::milliseconds(200);  // default of SequenceOptions::deadline

  // Verifies the tile checksums of every n-th fetched page; 1 verifies all pages, 0 none. Headers
  // are always verified. Pages attended in place have not been copied since crumbd verified them,
  // so that this finds bad memory.
  uint32_t verify_every = 64;

  // The quality watch measures the attention error (see QualitySample) of one KV head in every n-th
  // evicted window; 0: in none. If the mean over the latest `watch_windows` samples exceeds
  // watch_error_bound(), new sequences of all processes in the keyspace store BF16 until an
  // operator switches INT2 back on. docs/client.md has usual errors.
  uint32_t watch_every = 64;
  int watch_windows = 32;
  // bound relative to the calibrated error; <= 0: see watch_error_max
  float watch_error_factor = 1.3f;
  float watch_error_max = 0.6f;  // bound if there is no calibrated error; <= 0: none of either kind

  // Distributes the work of one call over KV heads. Empty: the calling thread does all of it.
  ParallelFor parallel_for;

  // Sets method, rotations, clips and v_basis from a rotation file. Errors as for ReadRotationFile
  // and RotationSet::FromFile; kInvalidArgument: the program does not know the method.
  absl::Status UseRotationFile(const std::string& path);

  // kInvalidArgument names the field that is wrong. Worker::Open, DeviceWorker::Open and
  // Transfer::Open call it.
  absl::Status Validate() const;

  // Returns `part` with its empty ranges filled in.
  TileRange own_tiles() const;
  IndexRange own_q_head_range() const;
  int own_layers() const { return own_tiles().layers.size(); }
  int own_kv_heads() const { return own_tiles().heads.size(); }
  int own_q_heads() const { return own_q_head_range().size(); }
  // Returns windows[i] of this rank's layer, which is counted from its first; 0: no window.
  int own_window(int layer) const;
  // Returns this rank's part of sink_logits, [own_layers, own_q_heads], or nothing.
  std::vector<float> own_sink_logits() const;
  TileRange all_tiles() const {
    return {{0, static_cast<uint16_t>(layers)}, {0, static_cast<uint16_t>(kv_heads)}};
  }

  // Returns the bound for the mean attention error of this rank's layers and heads; 0: none.
  double watch_error_bound() const;

  kernels::TileShape tile_shape() const {
    return {.tokens = 64, .head_dim = head_dim, .group_size = group_size};
  }
};

}  // namespace crumb::client
