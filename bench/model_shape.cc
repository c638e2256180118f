// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/model_shape.h"

#include <algorithm>
#include <cmath>

#include "kernels/tile.h"

namespace crumb::bench {
namespace {

constexpr int kHeadDim = 128;
constexpr int kWeightBytes = 2;
constexpr kernels::TileShape kTile;

// The shapes are those of the models' published configurations.
const std::vector<ModelShape>& Shapes() {
  static const std::vector<ModelShape> shapes = {
      {.name = "qwen3-4b",
       .layers = 36,
       .hidden = 2560,
       .q_heads = 32,
       .kv_heads = 8,
       .ffn = 9728,
       .vocabulary = 151936,
       .tied = true},
      {.name = "qwen3-8b",
       .layers = 36,
       .hidden = 4096,
       .q_heads = 32,
       .kv_heads = 8,
       .ffn = 12288,
       .vocabulary = 151936},
      // One of eight tensor-parallel ranks, with an eighth of heads, FFN, experts and vocabulary.
      {.name = "glm-4.7",
       .layers = 92,
       .hidden = 5120,
       .q_heads = 12,
       .kv_heads = 1,
       .ffn = 1536,
       .vocabulary = 18944,
       .rotary_dim = 64,
       .epsilon = 1e-5,
       .experts = {.count = 160, .active = 8, .shared = 1, .ffn = 192, .dense_layers = 3}},
  };
  return shapes;
}

int64_t TokenBytes(const ModelShape& model) {  // in BF16, K and V of all layers
  return int64_t{2} * 2 * kHeadDim * model.kv_heads * model.layers;
}

int64_t PageBytes(const ModelShape& model) {
  return static_cast<int64_t>(kTile.int2_bytes()) * model.kv_heads * model.layers;
}

}  // namespace

int ModelShape::ExpertsRead(int batch) const {
  if (experts.count == 0) return 0;
  const double missed = std::pow(1.0 - double(experts.active) / experts.count, batch);
  return experts.shared + static_cast<int>(std::lround(experts.count * (1.0 - missed)));
}

int64_t ModelShape::projection_bytes() const {
  const int64_t attention = int64_t{layers} * (qkv_outputs() + q_heads * kHeadDim);
  const int64_t dense = int64_t{dense_layers()} * 3 * ffn;
  const int64_t routers = int64_t{expert_layers()} * experts.count;
  return (attention + dense + routers + vocabulary) * hidden * kWeightBytes;
}

int64_t ModelShape::weight_bytes() const {
  const int64_t table = tied ? 0 : int64_t{hidden} * vocabulary * kWeightBytes;
  return projection_bytes() + table +
         expert_layers() * (experts.count + experts.shared) * expert_bytes();
}

std::vector<std::string> ModelShapeNames() {
  std::vector<std::string> names;
  for (const ModelShape& shape : Shapes()) names.push_back(shape.name);
  return names;
}

std::optional<ModelShape> ModelShapeNamed(const std::string& name) {
  for (const ModelShape& shape : Shapes()) {
    if (shape.name == name) return shape;
  }
  return std::nullopt;
}

SequenceShape SequenceOf(int context) {
  const int windows = SequenceShape::kSinkTokens + SequenceShape::kRecentTokens;
  return {std::max(1, (context - windows) / kTile.tokens)};
}

int64_t HeldBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv) {
  if (kv == KvFormat::kBf16) return sequence.tokens() * TokenBytes(model);
  return sequence.pages * PageBytes(model) +
         (SequenceShape::kSinkTokens + SequenceShape::kRingSlots) * TokenBytes(model);
}

int64_t ReadBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv) {
  if (kv == KvFormat::kBf16) return sequence.tokens() * TokenBytes(model);
  return sequence.pages * PageBytes(model) +
         (SequenceShape::kSinkTokens + SequenceShape::kRecentTokens) * TokenBytes(model);
}

int LargestBatch(const ModelShape& model, const SequenceShape& sequence, KvFormat kv,
                 int64_t memory_bytes) {
  const int64_t room = memory_bytes - kReservedBytes - model.weight_bytes();
  return static_cast<int>(std::max<int64_t>(0, room) / HeldBytes(model, sequence, kv));
}

int64_t StepBytes(const ModelShape& model, const SequenceShape& sequence, KvFormat kv, int batch) {
  return model.projection_bytes() +
         model.expert_layers() * model.ExpertsRead(batch) * model.expert_bytes() +
         batch * ReadBytes(model, sequence, kv);
}

const char* Name(KvFormat kv) { return kv == KvFormat::kBf16 ? "bf16" : "int2"; }

}  // namespace crumb::bench
