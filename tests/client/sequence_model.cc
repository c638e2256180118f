// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "sequence_model.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "common/page_key.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "kernels/quantize.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

WorkerOptions SmallWorkerOptions() {
  WorkerOptions options;
  options.model = "test-model";
  options.weights = "test-weights";
  options.layers = 2;
  options.kv_heads = 2;
  options.q_heads = 4;
  options.head_dim = 64;
  options.group_size = 64;
  options.prefill_block = 512;
  options.rotations = RotationSet::Hadamard(64).value();
  return options;
}

WorkerOptions WindowedWorkerOptions() {
  WorkerOptions options = SmallWorkerOptions();
  options.layers = 4;
  options.q_heads = 16;
  options.windows = {128, 0, 128, 0};
  // The logits of the sink outweigh most keys in some heads and none in others.
  std::mt19937 random(20);
  std::uniform_real_distribution<float> logit(-2.0f, 6.0f);
  for (int i = 0; i < options.layers * options.q_heads; ++i) {
    options.sink_logits.push_back(logit(random));
  }
  return options;
}

std::vector<int32_t> RandomTokens(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 50000);
  return tokens;
}

std::vector<Bf16> SequenceModel::Rows(Kind kind, int layer, int begin, int end) const {
  const int heads = kind == Kind::kQuery ? options_.q_heads : options_.kv_heads;
  std::vector<Bf16> rows;
  rows.reserve(static_cast<size_t>(end - begin) * heads * options_.head_dim);
  for (int p = begin; p < end; ++p) {
    uint64_t state = Mix((uint64_t{static_cast<uint32_t>(tokens_[p])} << 32) ^ (uint64_t(p) << 8) ^
                         (uint64_t(layer) << 2) ^ static_cast<uint64_t>(kind));
    for (int i = 0; i < heads * options_.head_dim; ++i) {
      state = Mix(state);
      // An outlier channel makes quantization hard.
      const float gain = i % options_.head_dim == 3 ? 6.0f : 1.0f;
      rows.push_back(
          kernels::Bf16FromFloat(gain * (static_cast<float>(state >> 40) / 8388608.0f - 1.0f)));
    }
  }
  return rows;
}

std::vector<Bf16> SequenceModel::Keys(int layer, int begin, int end) const {
  return Rows(Kind::kKey, layer, begin, end);
}
std::vector<Bf16> SequenceModel::Values(int layer, int begin, int end) const {
  return Rows(Kind::kValue, layer, begin, end);
}
std::vector<Bf16> SequenceModel::Queries(int layer, int begin, int end) const {
  return Rows(Kind::kQuery, layer, begin, end);
}

void SequenceModel::Window(int layer, int head, int page, bool stored, std::vector<float>* k,
                           std::vector<float>* v) const {
  const int dim = options_.head_dim;
  const int begin = page * kPageTokens;
  const int end = std::min(begin + kPageTokens, static_cast<int>(tokens_.size()));
  const std::vector<Bf16> keys = Keys(layer, begin, end);
  const std::vector<Bf16> values = Values(layer, begin, end);
  const int64_t stride = int64_t{options_.kv_heads} * dim;
  k->assign(size_t{kPageTokens} * dim, 0.0f);
  v->assign(size_t{kPageTokens} * dim, 0.0f);
  if (!stored) {
    for (int t = 0; t < end - begin; ++t) {
      for (int c = 0; c < dim; ++c) {
        (*k)[t * dim + c] = kernels::Bf16ToFloat(keys[t * stride + head * dim + c]);
        (*v)[t * dim + c] = kernels::Bf16ToFloat(values[t * stride + head * dim + c]);
      }
    }
    return;
  }
  const auto layers = options_.rotations.Expand(options_.layers, options_.kv_heads);
  const RotationSet::Layer& data = *layers[layer];
  const auto at = [&](const float* values_of_heads, int64_t item) {
    return values_of_heads == nullptr ? nullptr : values_of_heads + head * item;
  };
  const int64_t square = int64_t{dim} * dim;
  kernels::QuantizeParams params;
  params.shape = options_.tile_shape();
  params.method = options_.method;
  params.k = keys.data() + head * dim;
  params.v = values.data() + head * dim;
  params.k_stride = params.v_stride = stride;
  // Page `page` is history page `page` - 1, which has the means of its positions.
  const RotationSet& rotations = options_.rotations;
  const int64_t blocks = rotations.position_blocks();
  const int64_t block =
      std::min<int64_t>((page - 1) / rotations.pages_per_position_block(), blocks - 1);
  const float* means_k = at(data.rotated_mean_k(), blocks * dim);
  params.k_transform = {at(data.rotation_k(), square),
                        means_k == nullptr ? nullptr : means_k + block * dim, options_.clip_k,
                        at(data.feedback_k(), square), at(data.dual_k(), square)};
  params.v_transform = {at(data.rotation_v(), square), at(data.rotated_mean_v(), dim),
                        options_.clip_v, at(data.feedback_v(), square), at(data.dual_v(), square)};
  alignas(128) uint8_t tile[16384];
  params.tile = tile;
  kernels::QuantizeTile(params);
  kernels::DequantizeTileToModel(params.shape, tile, params.k_transform, params.v_transform,
                                 k->data(), v->data());
}

std::vector<double> SequenceModel::Expected(int layer, int position, int history_end) const {
  const int dim = options_.head_dim;
  const int group = options_.q_heads / options_.kv_heads;
  const std::vector<Bf16> q = Queries(layer, position, position + 1);
  std::vector<double> out(static_cast<size_t>(options_.q_heads) * dim, 0.0);
  const auto layers = options_.rotations.Expand(options_.layers, options_.kv_heads);
  const float* shifts = layers[layer]->shift();
  const int window = options_.windows.empty() ? 0 : options_.windows[layer];
  const int first = window == 0 ? 0 : std::max(0, position - window + 1);
  for (int head = 0; head < options_.kv_heads; ++head) {
    std::vector<double> sum(group, 0.0);
    for (int g = 0; g < group && !options_.sink_logits.empty(); ++g) {
      sum[g] = std::exp(options_.sink_logits[layer * options_.q_heads + head * group + g]);
    }
    std::vector<float> k, v;
    for (int page = first / kPageTokens; page * kPageTokens <= position; ++page) {
      const bool stored = options_.history_format == kernels::PageFormat::kInt2 && page > 0 &&
                          (page + 1) * kPageTokens <= history_end;
      Window(layer, head, page, stored, &k, &v);
      for (int t = std::max(0, first - page * kPageTokens);
           t < kPageTokens && page * kPageTokens + t <= position; ++t) {
        for (int g = 0; g < group; ++g) {
          const int q_head = head * group + g;
          double dot = 0.0;
          for (int c = 0; c < dim; ++c) {
            dot += double{kernels::Bf16ToFloat(q[q_head * dim + c])} * k[t * dim + c];
          }
          const double shift = stored && shifts != nullptr ? shifts[q_head] : 0.0;
          const double p = std::exp(dot / std::sqrt(double(dim)) - shift);
          sum[g] += p;
          for (int c = 0; c < dim; ++c) out[q_head * dim + c] += p * v[t * dim + c];
        }
      }
    }
    for (int g = 0; g < group; ++g) {
      for (int c = 0; c < dim; ++c) out[(head * group + g) * dim + c] /= sum[g];
    }
  }
  return out;
}

std::vector<float> SequenceModel::Pass(Sequence& sequence, int end, int accepted) const {
  const int begin = sequence.length();
  const int tokens = end - begin;
  const size_t layer_size = static_cast<size_t>(tokens) * options_.q_heads * options_.head_dim;
  std::vector<float> out(options_.layers * layer_size);
  for (int layer = 0; layer < options_.layers; ++layer) {
    const auto k = Keys(layer, begin, end);
    const auto v = Values(layer, begin, end);
    const auto q = Queries(layer, begin, end);
    EXPECT_TRUE(sequence.Append(layer, tokens, k.data(), v.data()).ok());
    EXPECT_TRUE(sequence.Attend(layer, tokens, q.data(), out.data() + layer * layer_size).ok());
  }
  const absl::Status status =
      sequence.Advance({tokens_.data() + begin, static_cast<size_t>(accepted)});
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

}  // namespace crumb::client
