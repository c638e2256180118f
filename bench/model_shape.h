// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// The shapes of models whose decode steps are timed, and the bytes that a step reads and holds.
// They need no CUDA.
namespace crumb::bench {

// The ranges of the arguments of crumb-bench decode.
inline constexpr int kDecodeContextMin = 415;  // tokens: a page, the sink and the recent window
inline constexpr int kDecodeContextMax = 1 << 20;
inline constexpr int kDecodeBatchMax = 512;

enum class KvFormat : uint8_t { kBf16, kInt2 };

// One rank's part of a mixture of experts. Only the bytes of experts are modelled: those that a
// rank holds, and those that it reads for tokens whose experts are drawn evenly.
struct ExpertShape {
  int count = 0;         // routed experts; 0: the model has none
  int active = 0;        // routed experts per token
  int shared = 0;        // experts of every token
  int ffn = 0;           // width of one expert in this rank
  int dense_layers = 0;  // first layers, which have an FFN instead
};

// One rank's part of a model with head_dim 128.
struct ModelShape {
  std::string name;
  int layers = 0;
  int hidden = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int ffn = 0;
  int vocabulary = 0;
  bool tied = false;  // the last projection is the embedding table
  int rotary_dim = 128;
  double epsilon = 1e-6;
  ExpertShape experts = {};

  int qkv_outputs() const { return (q_heads + 2 * kv_heads) * 128; }
  // The number of layers with an FFN, and of those with experts.
  int dense_layers() const { return experts.count > 0 ? experts.dense_layers : layers; }
  int expert_layers() const { return layers - dense_layers(); }
  // The bytes of one expert of one layer, one byte per element (FP8).
  int64_t expert_bytes() const { return int64_t{3} * hidden * experts.ffn; }
  // The mean number of a layer's experts, including shared ones, that `batch` tokens need, rounded.
  int ExpertsRead(int batch) const;

  // The bytes of projections (BF16) that every step reads, without experts.
  int64_t projection_bytes() const;
  // The bytes of all parameters in device memory.
  int64_t weight_bytes() const;
};

// Returns the names in the order of the documentation.
std::vector<std::string> ModelShapeNames();
std::optional<ModelShape> ModelShapeNamed(const std::string& name);

// The segments of one sequence halfway between two evictions.
struct SequenceShape {
  static constexpr int kSinkTokens = 64;
  static constexpr int kRecentTokens = 287;  // 256 to 319, on average
  static constexpr int kRingSlots = 328;

  int pages = 0;

  int tokens() const { return kSinkTokens + 64 * pages + kRecentTokens; }
};

// Returns the segments of at most `context` tokens. REQUIRES: context is at least
// kDecodeContextMin.
SequenceShape SequenceOf(int context);

// Return the bytes of keys and values that one sequence holds, and those that one step reads of it.
int64_t HeldBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv);
int64_t ReadBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv);

// Bytes of device memory that are reserved for activations, workspaces and the driver.
inline constexpr int64_t kReservedBytes = 1'000'000'000;

// Returns the number of sequences that fit into `memory_bytes` beside the weights.
int LargestBatch(const ModelShape& model, const SequenceShape& sequence, KvFormat kv,
                 int64_t memory_bytes);

// Returns the bytes that one step of `batch` sequences must read: weights once, keys and values of
// each.
int64_t StepBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv, int batch);

const char* Name(KvFormat kv);

}  // namespace crumb::bench
