// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "common/page_key.h"
#include "kernels/bf16.h"
#include "kernels/window_error.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::PageFormat;

// Number of query tokens per task; bounds the work memory and lets long prompts use many threads.
constexpr int kTokensPerTask = 64;

// Returns item `index` of an array of items; null if `items` is null.
const float* ItemOf(const float* items, int64_t index, int64_t elements) {
  return items == nullptr ? nullptr : items + index * elements;
}

}  // namespace

bool AllFinite(const Bf16* values, size_t count) {
  constexpr uint16_t kExponent = 0x7f80;
  uint16_t bad = 0;
  for (size_t i = 0; i < count; ++i) bad |= (values[i].bits & kExponent) == kExponent;
  return bad == 0;
}

CpuBackend::CpuBackend(const WorkerOptions& options)
    : options_(options),
      layers_(options.rotations.Expand(options.own_tiles(), options.own_q_head_range())),
      sink_logits_(options.own_sink_logits()) {}

void CpuBackend::Parallel(int count, const std::function<void(int)>& body) const {
  if (options_.parallel_for && count > 1) {
    options_.parallel_for(count, body);
    return;
  }
  for (int i = 0; i < count; ++i) body(i);
}

// Returns the block whose means were subtracted from the history page at `position`.
int CpuBackend::PositionBlock(int position) const {
  const int page = position / kPageTokens - 1;  // page 0 is the sink
  return std::clamp(page / options_.rotations.pages_per_position_block(), 0,
                    options_.rotations.position_blocks() - 1);
}

WindowRows CpuBackend::RowsOf(const RecentRows& rows, int position, int layer, int head) {
  const int64_t at = head * rows.head_stride() + rows.slot(position) * rows.token_stride();
  return {.k = rows.k(layer) + at, .v = rows.v(layer) + at, .stride = rows.token_stride()};
}

kernels::QuantizeParams CpuBackend::TileParams(const WindowRows& rows, int position, int layer,
                                               int head, std::byte* tile) const {
  const int64_t dim = options_.head_dim;
  const RotationSet::Layer& data = *layers_[layer];
  kernels::QuantizeParams params;
  params.shape = options_.tile_shape();
  params.method = options_.method;
  params.k = rows.k;
  params.v = rows.v;
  params.k_stride = params.v_stride = rows.stride;
  const int64_t mean_row =
      int64_t{head} * options_.rotations.position_blocks() + PositionBlock(position);
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
  params.tile = reinterpret_cast<uint8_t*>(tile);
  return params;
}

uint32_t CpuBackend::StoreTile(const WindowRows& rows, int position, int layer, int head,
                               const Page& page) const {
  const kernels::QuantizeParams params =
      TileParams(rows, position, layer, head, page.layer(layer) + page.tile_bytes * head);
  if (page.format == PageFormat::kInt2) return kernels::QuantizeTile(params);
  const size_t elements = size_t{kPageTokens} * options_.head_dim;
  std::memcpy(params.tile, params.k, elements * sizeof(Bf16));
  std::memcpy(params.tile + elements * sizeof(Bf16), params.v, elements * sizeof(Bf16));
  const bool finite = AllFinite(reinterpret_cast<const Bf16*>(params.tile), 2 * elements);
  return finite ? 0 : kernels::kStatusNonFinite;
}

uint32_t CpuBackend::StoreWindow(const RecentRows& rows, int position, int layer_begin,
                                 int layer_end, const Page& page) const {
  std::atomic<uint32_t> status{0};
  const int heads = options_.own_kv_heads();
  Parallel((layer_end - layer_begin) * heads, [&](int task) {
    const int layer = layer_begin + task / heads;
    const int head = task % heads;
    status.fetch_or(StoreTile(RowsOf(rows, position, layer, head), position, layer, head, page),
                    std::memory_order_relaxed);
  });
  return status.load();
}

uint32_t CpuBackend::StoreTile(const WindowRows& rows, int layer, int head,
                               const Page& page) const {
  return StoreTile(rows, static_cast<int>(page.position) * kPageTokens, layer, head, page);
}

uint32_t CpuBackend::StoreTiles(const std::function<WindowRows(int head)>& rows_of, int layer,
                                const Page& page) const {
  std::atomic<uint32_t> status{0};
  Parallel(options_.own_kv_heads(), [&](int head) {
    status.fetch_or(StoreTile(rows_of(head), layer, head, page), std::memory_order_relaxed);
  });
  return status.load();
}

void CpuBackend::ReadTile(const Page& page, int layer, int head, Bf16* k, Bf16* v) const {
  const size_t elements = size_t{kPageTokens} * options_.head_dim;
  std::byte* const tile = page.layer(layer) + page.tile_bytes * head;
  if (page.format == PageFormat::kBf16) {
    std::memcpy(k, tile, elements * sizeof(Bf16));
    std::memcpy(v, tile + elements * sizeof(Bf16), elements * sizeof(Bf16));
    return;
  }
  const kernels::QuantizeParams params =
      TileParams({}, static_cast<int>(page.position) * kPageTokens, layer, head, tile);
  std::vector<float> rows(2 * elements);
  kernels::DequantizeTileToModel(params.shape, params.tile, params.k_transform, params.v_transform,
                                 rows.data(), rows.data() + elements);
  for (size_t i = 0; i < elements; ++i) {
    k[i] = kernels::Bf16FromFloat(rows[i]);
    v[i] = kernels::Bf16FromFloat(rows[elements + i]);
  }
}

QualitySample CpuBackend::Measure(const RecentRows& rows, int position, int layer, int head,
                                  const Page& page, std::span<const float> queries) const {
  return Measure(RowsOf(rows, position, layer, head), position, layer, head,
                 page.layer(layer) + page.tile_bytes * head, queries);
}

QualitySample CpuBackend::Measure(const WindowRows& rows, int position, int layer, int head,
                                  std::byte* tile, std::span<const float> queries) const {
  const float scale = options_.scale != 0.0f
                          ? options_.scale
                          : 1.0f / std::sqrt(static_cast<float>(options_.head_dim));
  const kernels::WindowError error = kernels::MeasureWindow(
      TileParams(rows, position, layer, head, tile), queries, scale, options_.soft_cap);
  return {.layer = options_.own_tiles().layers.begin + layer,
          .attention_error = error.attention,
          .key_error = error.key,
          .value_error = error.value};
}

kernels::AttentionParams CpuBackend::ParamsOf(const AttentionCall& call) const {
  kernels::AttentionParams params;
  params.shape = options_.tile_shape();
  params.history_format = call.history_format;
  params.kv_heads = options_.own_kv_heads();
  params.q_heads = options_.own_q_heads();
  params.sink_tokens = call.sink_tokens;
  params.sink_k = call.sink.k;
  params.sink_v = call.sink.v;
  params.sink_head_stride = call.sink.head_stride;
  params.sink_token_stride = call.sink.token_stride;
  params.pages = static_cast<int>(call.pages.size());
  params.page_address = call.pages.data();
  params.page_head_stride = static_cast<int64_t>(params.shape.bytes(call.history_format));
  params.recent_begin = call.recent_begin;
  params.recent_capacity = call.recent_capacity;
  params.recent_k = call.recent.k;
  params.recent_v = call.recent.v;
  params.recent_head_stride = call.recent.head_stride;
  params.recent_token_stride = call.recent.token_stride;
  if (call.history_format == PageFormat::kInt2) {
    const RotationSet::Layer& data = *layers_[call.layer];
    params.rotation_k = data.dual_k();
    params.rotation_v = data.dual_v();
    params.mean_v = data.rotated_mean_v();
    params.shift = data.shift();
    params.pages_per_position_block = options_.rotations.pages_per_position_block();
    if (data.mean_k_columns() != nullptr && params.pages > 0) {
      params.position_blocks = 1 + PositionBlock(kPageTokens * params.pages);
    }
  }
  params.scale = options_.scale;
  params.soft_cap = options_.soft_cap;
  params.window = options_.own_window(call.layer);
  if (!sink_logits_.empty()) {
    params.sink_logit = ItemOf(sink_logits_.data(), call.layer, options_.own_q_heads());
  }
  return params;
}

// Returns q . mu_k of the query rows of one KV head, which the stored keys lack because their mean
// was subtracted.
std::vector<float> CpuBackend::OffsetsOf(const AttentionCall& call, int kv_head,
                                         const kernels::AttentionParams& params) const {
  if (params.position_blocks == 0) return {};
  const int dim = options_.head_dim;
  const int group = options_.own_q_heads() / options_.own_kv_heads();
  const int64_t blocks = options_.rotations.position_blocks();
  const float* mean = layers_[call.layer]->mean_k_columns() + kv_head * dim * blocks;
  std::vector<float> offsets(static_cast<size_t>(params.q_tokens) * options_.own_q_heads() *
                             params.position_blocks);
  for (int row = 0; row < params.q_tokens * group; ++row) {
    const int64_t at =
        int64_t{row / group} * options_.own_q_heads() + kv_head * group + row % group;
    const Bf16* q = params.q + at * dim;
    float* out = &offsets[at * params.position_blocks];
    for (int i = 0; i < dim; ++i) {
      const float x = kernels::Bf16ToFloat(q[i]);
      for (int b = 0; b < params.position_blocks; ++b) out[b] += x * mean[i * blocks + b];
    }
  }
  return offsets;
}

absl::Status CpuBackend::Attend(const AttentionCall& call) const {
  const kernels::AttentionParams whole = ParamsOf(call);
  const int64_t row_elements = int64_t{options_.own_q_heads()} * options_.head_dim;
  const int slices = (call.q_tokens + kTokensPerTask - 1) / kTokensPerTask;
  std::atomic<bool> no_memory{false};
  Parallel(slices * options_.own_kv_heads(), [&](int task) {
    const int first = task / options_.own_kv_heads() * kTokensPerTask;
    const int last = std::min(call.q_tokens, first + kTokensPerTask);
    kernels::AttentionParams params = whole;
    params.q_tokens = last - first;
    params.q = call.q + first * row_elements;
    params.out = call.out + first * row_elements;
    const int head = task % options_.own_kv_heads();
    const std::vector<float> offsets = OffsetsOf(call, head, params);
    if (!offsets.empty()) params.offset = offsets.data();
    // Rows behind the slice's last token are not attended. They may lie in the sink while the
    // prompt is still inside it.
    const int behind = call.q_tokens - last;
    params.recent_tokens = std::max(0, call.recent_tokens - behind);
    params.sink_tokens -= std::max(0, behind - call.recent_tokens);
    const ScratchPool::Piece scratch = scratch_.Borrow(kernels::AttentionWorkspaceBytes(params));
    if (scratch.data() == nullptr) {
      no_memory = true;
      return;
    }
    kernels::Attend(params, head, head + 1, scratch.data());
  });
  if (no_memory) return absl::ResourceExhaustedError("no work memory for attention");
  return absl::OkStatus();
}

}  // namespace crumb::client
