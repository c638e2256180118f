// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

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
  IndexRange layers;      // of its pages
  IndexRange kv_heads;    // global
  IndexRange q_heads;     // global; of the groups of its KV heads
  bool publishes = true;  // false: another rank publishes the same tiles
  friend bool operator==(const RankPart&, const RankPart&) = default;
};

// A rank's place in an engine of tp_size * pp_size ranks.
struct RankPlace {
  int tp_rank = 0;
  int tp_size = 1;
  int pp_rank = 0;
  int pp_size = 1;
};

// The part that engines give to a rank. Layers: consecutive stages of equal size, the first ones
// with one layer more when they do not divide. Heads: equal shares; with more tensor-parallel ranks
// than KV heads, consecutive ranks hold the same KV head and share its query heads, and the lowest
// of them publishes. For an engine that cuts another way, fill in RankPart oneself.
// kInvalidArgument: a rank outside its size, more stages than layers, heads that do not divide.
absl::StatusOr<RankPart> PartOfRank(const RankPlace& place, int layers, int kv_heads, int q_heads);

// Runs body(0) .. body(count - 1), in any order and on any threads, and returns when all are done.
using ParallelFor = std::function<void(int count, const std::function<void(int)>& body)>;

// What a Worker is opened with. Fields up to `fields` decide what pages are interchangeable and go
// into the keyspace; the rest is this process's business.
struct WorkerOptions {
  std::string model;    // a name for people and metrics
  std::string weights;  // digest of the checkpoint, or the engine's weight version
  int layers = 0;
  int kv_heads = 0;
  int q_heads = 0;  // a multiple of kv_heads
  int head_dim = 0;
  int group_size = 128;  // elements that share a scale; at most head_dim
  kernels::PageFormat history_format = kernels::PageFormat::kInt2;
  kernels::Method method = kernels::Method::kOscar;  // how INT2 codes are chosen
  RotationSet rotations = RotationSet::Identity();
  float clip_k = 0.96f;  // fraction of |k| kept; <= 0: all
  float clip_v = 0.92f;
  // Of the rows that Append takes: "model", or "rotated" where R_V is folded into the weights. Then
  // `rotations` has no rotation_v.
  std::string v_basis = "model";
  std::string rope;          // effective RoPE configuration, as the engine writes it
  int prefill_block = 8192;  // absolute positions; a multiple of 64, at least 320
  std::string tenant;        // empty: the default tenant
  std::map<std::string, std::string> fields;  // further keyspace fields: LoRA id, weight format...

  // What this rank holds of the layers and heads above: its sequences count those from 0 on, and
  // its pages are fragments that ranks of any other degree can read. Rotations are the model's.
  RankPart part;

  int recent_tokens = 256;  // least length of the BF16 window; a multiple of 64
  int draft_slots = 8;      // fresh tokens of a decode step beyond the first
  float scale = 0.0f;       // of q.k; 0: 1 / sqrt(head_dim)
  float soft_cap = 0.0f;    // > 0: cap * tanh(logit / cap)

  size_t page_bytes_max = size_t{16} << 30;  // private memory for pages; beyond it Append fails
  // Of the latest prompts, kept with their page keys (4.5 bytes a token): a prompt that begins as
  // one of them is not hashed again that far. 0: none.
  size_t prompt_key_cache_tokens = size_t{1} << 20;
  // Pages that take as long to hash as crumbd takes for a question: a prompt with several times as
  // many unknown ones is asked for in parts, the next of which is hashed meanwhile. 0: at once.
  int part_pages = 256;
  size_t publish_queue_max = 1024;  // pages waiting to be published; more are dropped
  int publish_batch = 32;           // pages per Reserve and Commit
  Duration publish_deadline = std::chrono::seconds(2);       // of one such call
  Duration begin_deadline = std::chrono::milliseconds(200);  // default of SequenceOptions

  // Checks the tile sums of every n-th fetched page; 1: all, 0: none. Headers are always checked.
  // Pages attended in place have crossed nothing since crumbd checked them: this finds bad memory.
  uint32_t verify_every = 64;

  // The quality watch measures every n-th evicted window (0: none) of one KV head: the attention
  // error of QualitySample. When the mean over the latest `watch_windows` of them is above
  // watch_error_bound(), new sequences store BF16 and so does everybody in the keyspace, until a
  // command says otherwise. docs/client.md tells what errors are usual.
  uint32_t watch_every = 64;
  int watch_windows = 32;
  float watch_error_factor = 1.3f;  // of the error that calibration expects; <= 0: see below
  float watch_error_max = 0.6f;     // where that is not known; <= 0: no bound of either kind

  // Shares the work of one call over KV heads; empty: all on the calling thread.
  ParallelFor parallel_for;

  // Takes method, rotations, clips and v_basis from a rotation file. Errors of ReadRotationFile and
  // RotationSet::FromFile; kInvalidArgument: a method this program does not know.
  absl::Status UseRotationFile(const std::string& path);

  // kInvalidArgument naming the field that is wrong.
  absl::Status Validate() const;

  // `part` with its empty ranges filled in.
  TileRange own_tiles() const;
  IndexRange own_q_head_range() const;
  int own_layers() const { return own_tiles().layers.size(); }
  int own_kv_heads() const { return own_tiles().heads.size(); }
  int own_q_heads() const { return own_q_head_range().size(); }
  TileRange all_tiles() const {
    return {{0, static_cast<uint16_t>(layers)}, {0, static_cast<uint16_t>(kv_heads)}};
  }

  // Of the mean attention error of this rank's layers and heads; 0: none.
  double watch_error_bound() const;

  kernels::TileShape tile_shape() const {
    return {.tokens = 64, .head_dim = head_dim, .group_size = group_size};
  }
};

}  // namespace crumb::client
