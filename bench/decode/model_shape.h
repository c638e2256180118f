// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Shapes of models whose decode steps are timed, and what a step of them moves and holds. No CUDA.
namespace crumb::bench {

// What crumb-bench decode takes.
inline constexpr int kDecodeContextMin = 415;  // a page beside sink and recent window
inline constexpr int kDecodeContextMax = 1 << 20;
inline constexpr int kDecodeBatchMax = 512;

enum class KvFormat : uint8_t { kBf16, kInt2 };

// One rank's share of a mixture of experts. Of routed and shared experts only the bytes are
// modelled: what a rank keeps of them, and what it reads for tokens whose experts are drawn evenly.
struct ExpertShape {
  int count = 0;         // routed ones; 0: the model has none
  int active = 0;        // of them for a token
  int shared = 0;        // for every token
  int ffn = 0;           // of one expert, this rank's part
  int dense_layers = 0;  // the first ones, which have an FFN instead
};

// One rank's part of a model; head_dim 128.
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
  // Layers with an FFN, and with experts.
  int dense_layers() const { return experts.count > 0 ? experts.dense_layers : layers; }
  int expert_layers() const { return layers - dense_layers(); }
  // Of one expert of one layer, one byte an element (FP8).
  int64_t expert_bytes() const { return int64_t{3} * hidden * experts.ffn; }
  // How many of a layer's experts, shared ones included, some of `batch` tokens need: the mean,
  // rounded.
  int ExpertsRead(int batch) const;

  // Bytes of the projections (BF16) that every step reads, experts left out.
  int64_t projection_bytes() const;
  // Bytes of all parameters in device memory.
  int64_t weight_bytes() const;
};

// Names in the order they are documented.
std::vector<std::string> ModelShapeNames();
std::optional<ModelShape> ModelShapeNamed(const std::string& name);

// Where the tokens of one sequence lie in the middle of its way from one eviction to the next.
struct SequenceShape {
  static constexpr int kSinkTokens = 64;
  static constexpr int kRecentTokens = 287;  // 256 to 319, on average
  static constexpr int kRingSlots = 328;

  int pages = 0;

  int tokens() const { return kSinkTokens + 64 * pages + kRecentTokens; }
};

// At most `context` tokens. At least one page: context is at least kDecodeContextMin.
SequenceShape SequenceOf(int context);

// Bytes of keys and values that one sequence holds, and that one step reads of it.
int64_t HeldBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv);
int64_t ReadBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv);

// What is kept free for activations, workspaces and the driver's own.
inline constexpr int64_t kReservedBytes = 1'000'000'000;

// Sequences that fit beside the weights into `memory_bytes`; 0: none.
int LargestBatch(const ModelShape& model, const SequenceShape& sequence, KvFormat kv,
                 int64_t memory_bytes);

// Bytes that one step of `batch` sequences must read: weights once, keys and values of each.
int64_t StepBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv, int batch);

const char* Name(KvFormat kv);

}  // namespace crumb::bench
