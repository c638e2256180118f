// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/paged_cache.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "common/page_key.h"
#include "fmt/format.h"
#include "kernels/bf16.h"

namespace crumb::bench {
namespace {

using kernels::Bf16;
using kernels::TilePart;

constexpr int kRecentTokens = 256;
constexpr int kGroupSizeMax = 128;
constexpr size_t kAlignment = 128;

const float* ItemOf(const float* items, int64_t index, int64_t elements) {
  return items == nullptr ? nullptr : items + index * elements;
}

struct FreeAligned {
  void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(kAlignment)); }
};

std::shared_ptr<uint8_t[]> AlignedBytes(size_t bytes) {
  return {static_cast<uint8_t*>(::operator new[](bytes, std::align_val_t(kAlignment))),
          FreeAligned()};
}

}  // namespace

absl::Status AttendOnCpu(const kernels::AttentionParams& params) {
  const auto workspace = AlignedBytes(kernels::AttentionWorkspaceBytes(params));
  kernels::Attend(params, 0, params.kv_heads, workspace.get());
  return absl::OkStatus();
}

PagedCache::PagedCache(const PagedCacheOptions& options)
    : options_(options),
      shape_{.tokens = kPageTokens,
             .head_dim = options.model.head_dim,
             .group_size = std::min(options.model.head_dim, kGroupSizeMax)},
      rows_(size_t{2} * options.model.layers * options.model.kv_heads * options.context *
            options.model.head_dim),
      stored_(options.model.layers, 0),
      tiles_(options.int2 ? options.model.layers * (options.context / kPageTokens + 1) : 0) {}

absl::StatusOr<std::unique_ptr<MethodCache>> PagedCache::Fork() const {
  return std::unique_ptr<MethodCache>(std::make_unique<PagedCache>(*this));
}

Bf16* PagedCache::Rows(int layer, int part, int head) {
  const int64_t index = (int64_t{layer} * 2 + part) * options_.model.kv_heads + head;
  return rows_.data() + index * options_.context * options_.model.head_dim;
}

// Returns the end of the history for the pass that starts at length_.
int PagedCache::HistoryEnd() const {
  if (options_.prefill_block > 0) {
    return std::max(kPageTokens, length_ / options_.prefill_block * options_.prefill_block);
  }
  return std::max(kPageTokens,
                  std::max(0, length_ + 1 - kRecentTokens) / kPageTokens * kPageTokens);
}

absl::Status PagedCache::Append(int layer, int tokens, const Bf16* k, const Bf16* v) {
  if (length_ + tokens > options_.context) {
    return absl::InvalidArgumentError(
        fmt::format("{} tokens do not fit a context of {}", length_ + tokens, options_.context));
  }
  StoreWindows(layer, HistoryEnd());
  const int dim = options_.model.head_dim, heads = options_.model.kv_heads;
  for (int t = 0; t < tokens; ++t) {
    for (int head = 0; head < heads; ++head) {
      const int64_t from = (int64_t{t} * heads + head) * dim, to = int64_t{length_ + t} * dim;
      std::copy_n(k + from, dim, Rows(layer, 0, head) + to);
      std::copy_n(v + from, dim, Rows(layer, 1, head) + to);
    }
  }
  return absl::OkStatus();
}

void PagedCache::StoreWindows(int layer, int history_end) {
  const std::vector<std::shared_ptr<const WindowCodec>>& codecs = options_.codecs;
  const int pages = codecs.empty() ? 1 : codecs.front()->window_tokens() / kPageTokens;
  for (int& page = stored_[layer]; (page + 1 + pages) * kPageTokens <= history_end; page += pages) {
    for (int head = 0; head < options_.model.kv_heads; ++head) {
      if (!codecs.empty()) StoreRows(layer, head, page);
      if (options_.int2) StoreTile(layer, head, page);
    }
  }
}

void PagedCache::StoreRows(int layer, int head, int page) {
  const int dim = options_.model.head_dim;
  const size_t item = size_t{1} * layer * options_.model.kv_heads + head;
  const WindowCodec& codec =
      options_.codecs.size() > 1 ? *options_.codecs[item] : *options_.codecs.front();
  size_t bytes_stored = 0;
  for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
    Bf16* rows =
        Rows(layer, part == TilePart::kKey ? 0 : 1, head) + int64_t{page + 1} * kPageTokens * dim;
    WindowRows window(codec.window_tokens(), dim);
    for (Eigen::Index i = 0; i < window.size(); ++i) window.data()[i] = Bf16ToFloat(rows[i]);
    const std::vector<uint8_t> bytes = codec.Encode(part, window);
    bytes_stored += bytes.size();
    window = codec.Decode(part, bytes, codec.window_tokens());
    for (Eigen::Index i = 0; i < window.size(); ++i) {
      rows[i] = kernels::Bf16FromFloat(window.data()[i]);
    }
  }
  window_bytes_ = bytes_stored;
}

int PagedCache::PositionBlock(int page) const {
  return std::min(page / options_.pages_per_position_block, options_.position_blocks - 1);
}

void PagedCache::StoreTile(int layer, int head, int page) {
  const int64_t dim = options_.model.head_dim;
  const client::RotationSet::Layer& data = *options_.layers[layer];
  std::shared_ptr<uint8_t[]>& tiles = tiles_[layer * (options_.context / kPageTokens + 1) + page];
  if (head == 0) tiles = AlignedBytes(shape_.int2_bytes() * options_.model.kv_heads);
  const int64_t row = int64_t{page + 1} * kPageTokens * dim;
  const int64_t mean_row = int64_t{head} * options_.position_blocks + PositionBlock(page);
  kernels::QuantizeParams params;
  params.shape = shape_;
  params.method = options_.method;
  params.k = Rows(layer, 0, head) + row;
  params.v = Rows(layer, 1, head) + row;
  params.k_stride = params.v_stride = dim;
  params.k_transform = {.rotation = ItemOf(data.rotation_k(), head, dim * dim),
                        .mean = ItemOf(data.rotated_mean_k(), mean_row, dim),
                        .clip = options_.clip_k,
                        .feedback = ItemOf(data.feedback_k(), head, dim * dim),
                        .dual = ItemOf(data.dual_k(), head, dim * dim)};
  params.v_transform = {.rotation = ItemOf(data.rotation_v(), head, dim * dim),
                        .mean = ItemOf(data.rotated_mean_v(), head, dim),
                        .clip = options_.clip_v,
                        .feedback = ItemOf(data.feedback_v(), head, dim * dim),
                        .dual = ItemOf(data.dual_v(), head, dim * dim)};
  params.tile = tiles.get() + shape_.int2_bytes() * head;
  kernels::QuantizeTile(params);
  window_bytes_ = shape_.int2_bytes();
}

// Returns q . mu_k of every query row and position block.
std::vector<float> PagedCache::Offsets(int layer, int tokens, int blocks, const Bf16* q) const {
  const float* means = options_.layers[layer]->mean_k_columns();
  const int64_t dim = options_.model.head_dim, heads = options_.model.q_heads;
  const int64_t group = heads / options_.model.kv_heads;
  std::vector<float> offsets(tokens * heads * blocks);
  for (int64_t row = 0; row < tokens * heads; ++row) {
    const float* mean = means + row % heads / group * dim * options_.position_blocks;
    for (int64_t i = 0; i < dim; ++i) {
      const float x = kernels::Bf16ToFloat(q[row * dim + i]);
      for (int b = 0; b < blocks; ++b) {
        offsets[row * blocks + b] += x * mean[i * options_.position_blocks + b];
      }
    }
  }
  return offsets;
}

absl::Status PagedCache::Attend(int layer, int tokens, const Bf16* q, float* out) {
  const int dim = options_.model.head_dim;
  const int end = length_ + tokens, history_end = std::min(HistoryEnd(), end);
  kernels::AttentionParams params;
  params.shape = shape_;
  params.q_tokens = tokens;
  params.kv_heads = options_.model.kv_heads;
  params.q_heads = options_.model.q_heads;
  params.q = q;
  params.out = out;
  params.sink_k = Rows(layer, 0, 0);
  params.sink_v = Rows(layer, 1, 0);
  params.sink_head_stride = params.recent_head_stride = int64_t{options_.context} * dim;
  params.sink_token_stride = params.recent_token_stride = dim;
  params.recent_k = params.sink_k;
  params.recent_v = params.sink_v;
  params.recent_capacity = options_.context;
  std::vector<uint64_t> addresses;
  std::vector<float> offsets;
  if (options_.int2 && history_end > kPageTokens) {
    const client::RotationSet::Layer& data = *options_.layers[layer];
    params.sink_tokens = kPageTokens;
    params.pages = history_end / kPageTokens - 1;
    for (int page = 0; page < params.pages; ++page) {
      addresses.push_back(reinterpret_cast<uint64_t>(
          tiles_[layer * (options_.context / kPageTokens + 1) + page].get()));
    }
    params.page_address = addresses.data();
    params.page_head_stride = static_cast<int64_t>(shape_.int2_bytes());
    params.rotation_k = data.dual_k();
    params.rotation_v = data.dual_v();
    params.mean_v = data.rotated_mean_v();
    params.shift = data.shift();
    params.pages_per_position_block = options_.pages_per_position_block;
    if (data.mean_k_columns() != nullptr) {
      params.position_blocks = 1 + PositionBlock(params.pages - 1);
      offsets = Offsets(layer, tokens, params.position_blocks, q);
      params.offset = offsets.data();
    }
    params.recent_begin = params.sink_tokens + params.pages * kPageTokens;
  }
  // Without tiles all rows are contiguous, and form one long recent window.
  params.recent_tokens = end - params.recent_begin;
  return options_.attend(params);
}

absl::Status PagedCache::Advance(std::span<const int32_t> tokens) {
  length_ += static_cast<int>(tokens.size());
  return absl::OkStatus();
}

}  // namespace crumb::bench
