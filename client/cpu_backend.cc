// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/page_key.h"
#include "kernels/bf16.h"
#include "kernels/quantize.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::PageFormat;

// Query tokens per task: bounds the work memory and lets long prompts keep many threads busy.
constexpr int kTokensPerTask = 64;

kernels::RowTransform TransformOf(const float* rotation, const float* mean, int head, int head_dim,
                                  float clip) {
  const int64_t dim = head_dim;
  return {.rotation = rotation == nullptr ? nullptr : rotation + head * dim * dim,
          .mean = mean == nullptr ? nullptr : mean + head * dim,
          .clip = clip};
}

}  // namespace

bool AllFinite(const Bf16* values, size_t count) {
  constexpr uint16_t kExponent = 0x7f80;
  uint16_t bad = 0;
  for (size_t i = 0; i < count; ++i) bad |= (values[i].bits & kExponent) == kExponent;
  return bad == 0;
}

CpuBackend::CpuBackend(const WorkerOptions& options)
    : options_(options), layers_(options.rotations.Expand(options.layers, options.kv_heads)) {}

void CpuBackend::Parallel(int count, const std::function<void(int)>& body) const {
  if (options_.parallel_for && count > 1) {
    options_.parallel_for(count, body);
    return;
  }
  for (int i = 0; i < count; ++i) body(i);
}

uint32_t CpuBackend::StoreTile(const RecentRows& rows, int position, int layer, int head,
                               const Page& page) const {
  const int64_t dim = options_.head_dim;
  const int64_t at = head * rows.head_stride() + rows.slot(position) * rows.token_stride();
  std::byte* tile = page.layer(layer) + page.tile_bytes * head;
  if (page.format == PageFormat::kBf16) {
    const size_t elements = size_t{kPageTokens} * dim;
    std::memcpy(tile, rows.k(layer) + at, elements * sizeof(Bf16));
    std::memcpy(tile + elements * sizeof(Bf16), rows.v(layer) + at, elements * sizeof(Bf16));
    const bool finite = AllFinite(reinterpret_cast<const Bf16*>(tile), 2 * elements);
    return finite ? 0 : kernels::kStatusNonFinite;
  }
  const RotationSet::Layer& data = *layers_[layer];
  kernels::QuantizeParams params;
  params.shape = options_.tile_shape();
  params.k = rows.k(layer) + at;
  params.v = rows.v(layer) + at;
  params.k_stride = params.v_stride = rows.token_stride();
  params.k_transform = TransformOf(data.rotation_k(), data.rotated_mean_k(), head,
                                   options_.head_dim, options_.clip_k);
  params.v_transform = TransformOf(data.rotation_v(), data.rotated_mean_v(), head,
                                   options_.head_dim, options_.clip_v);
  params.tile = reinterpret_cast<uint8_t*>(tile);
  return kernels::QuantizeTile(params);
}

uint32_t CpuBackend::StoreWindow(const RecentRows& rows, int position, int layer_begin,
                                 int layer_end, const Page& page) const {
  std::atomic<uint32_t> status{0};
  const int heads = options_.kv_heads;
  Parallel((layer_end - layer_begin) * heads, [&](int task) {
    const int layer = layer_begin + task / heads;
    status.fetch_or(StoreTile(rows, position, layer, task % heads, page),
                    std::memory_order_relaxed);
  });
  return status.load();
}

kernels::AttentionParams CpuBackend::ParamsOf(const AttentionCall& call) const {
  kernels::AttentionParams params;
  const int64_t dim = options_.head_dim;
  params.shape = options_.tile_shape();
  params.history_format = call.history_format;
  params.kv_heads = options_.kv_heads;
  params.q_heads = options_.q_heads;
  params.sink_tokens = call.sink_tokens;
  if (call.sink_tokens > 0) {
    params.sink_k = reinterpret_cast<const Bf16*>(call.sink->layer(call.layer));
    params.sink_v = params.sink_k + kPageTokens * dim;
    params.sink_head_stride = static_cast<int64_t>(call.sink->tile_bytes / sizeof(Bf16));
    params.sink_token_stride = dim;
  }
  params.pages = static_cast<int>(call.pages.size());
  params.page_address = call.pages.data();
  params.page_head_stride = static_cast<int64_t>(params.shape.bytes(call.history_format));
  params.recent_begin = call.rows->capacity() == 0 ? 0 : call.rows->slot(call.recent_begin);
  params.recent_capacity = call.rows->capacity();
  params.recent_k = call.rows->k(call.layer);
  params.recent_v = call.rows->v(call.layer);
  params.recent_head_stride = call.rows->head_stride();
  params.recent_token_stride = call.rows->token_stride();
  if (call.history_format == PageFormat::kInt2) {
    const RotationSet::Layer& data = *layers_[call.layer];
    params.rotation_k = data.rotation_k();
    params.rotation_v = data.rotation_v();
    params.mean_v = data.rotated_mean_v();
    params.position_blocks = 1;
  }
  params.scale = options_.scale;
  params.soft_cap = options_.soft_cap;
  return params;
}

// q . mu_k of every query row: what centring took out of the stored keys.
std::vector<float> CpuBackend::OffsetsOf(const AttentionCall& call) const {
  const float* mean = layers_[call.layer]->mean_k();
  if (mean == nullptr || call.history_format != PageFormat::kInt2 || call.pages.empty()) return {};
  const int dim = options_.head_dim;
  const int group = options_.q_heads / options_.kv_heads;
  std::vector<float> offsets(static_cast<size_t>(call.q_tokens) * options_.q_heads);
  for (size_t row = 0; row < offsets.size(); ++row) {
    const Bf16* q = call.q + row * dim;
    const float* mu = mean + static_cast<int64_t>(row % options_.q_heads / group) * dim;
    float sum = 0.0f;
    for (int i = 0; i < dim; ++i) sum += kernels::Bf16ToFloat(q[i]) * mu[i];
    offsets[row] = sum;
  }
  return offsets;
}

absl::Status CpuBackend::Attend(const AttentionCall& call) const {
  const kernels::AttentionParams whole = ParamsOf(call);
  const std::vector<float> offsets = OffsetsOf(call);
  const int64_t row_elements = int64_t{options_.q_heads} * options_.head_dim;
  const int slices = (call.q_tokens + kTokensPerTask - 1) / kTokensPerTask;
  std::atomic<bool> no_memory{false};
  Parallel(slices * options_.kv_heads, [&](int task) {
    const int first = task / options_.kv_heads * kTokensPerTask;
    const int last = std::min(call.q_tokens, first + kTokensPerTask);
    kernels::AttentionParams params = whole;
    params.q_tokens = last - first;
    params.q = call.q + first * row_elements;
    params.out = call.out + first * row_elements;
    if (!offsets.empty()) params.offset = offsets.data() + int64_t{first} * options_.q_heads;
    // Rows behind the slice's last token are not attended. While the prompt is still inside the
    // sink they lie there.
    const int behind = call.q_tokens - last;
    params.recent_tokens = std::max(0, call.recent_tokens - behind);
    params.sink_tokens -= std::max(0, behind - call.recent_tokens);
    const ScratchPool::Piece scratch = scratch_.Borrow(kernels::AttentionWorkspaceBytes(params));
    if (scratch.data() == nullptr) {
      no_memory = true;
      return;
    }
    const int head = task % options_.kv_heads;
    kernels::Attend(params, head, head + 1, scratch.data());
  });
  if (no_memory) return absl::ResourceExhaustedError("no work memory for attention");
  return absl::OkStatus();
}

}  // namespace crumb::client
