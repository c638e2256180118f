// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/simulated_kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "client/cpu/cpu_backend.h"
#include "client/worker/page_pool.h"
#include "common/crc32c.h"
#include "common/status_macros.h"
#include "gtest/gtest.h"
#include "kernels/attention.h"
#include "kernels/bf16.h"
#include "kernels/fp8.h"
#include "kernels/quantize.h"
#include "tests/client/gpu/simulated_device.h"

namespace crumb::client {
namespace {

using kernels::AttentionParams;
using kernels::Bf16;
using kernels::PageFormat;
using kernels::cuda::Bf16Rows;
using kernels::cuda::OutType;

// The CPU back end has the same number.
constexpr int kTokensPerTask = 64;

std::byte* Row(const Bf16Rows& rows, int sequence, int head, int slot, bool value) {
  return reinterpret_cast<std::byte*>(rows.address[sequence] + rows.layer_offset +
                                      head * rows.head_stride + slot * rows.token_stride +
                                      (value ? rows.v_offset : 0));
}

const float* ItemOf(const float* items, int64_t index, int64_t elements) {
  return items == nullptr ? nullptr : items + index * elements;
}

// Sets all parameters except lengths, q and out.
template <typename Params>
AttentionParams StaticOf(const Params& p) {
  AttentionParams out;
  out.shape = p.shape.tile;
  out.kv_heads = p.shape.kv_heads;
  out.q_heads = p.shape.q_heads;
  out.page_head_stride = p.page_head_stride;
  out.rotation_k = p.rotation_k;
  out.rotation_v = p.rotation_v;
  out.mean_v = p.mean_v;
  out.position_blocks = p.offset == nullptr ? 0 : p.position_blocks;
  out.pages_per_position_block = p.pages_per_position_block;
  out.shift = p.shift;
  out.scale = p.scale;
  out.soft_cap = p.soft_cap;
  out.window = p.window;
  out.sink_logit = p.sink_logit;
  return out;
}

// Sets the history of a sequence, which has one format here; BF16 pages are laid out as sinks.
template <typename Params>
std::vector<uint64_t> HistoryOf(const Params& p, int sequence, AttentionParams* out) {
  const int int2 = p.lengths.pages[sequence];
  const int bf16 = p.lengths.bf16_pages == nullptr ? 0 : p.lengths.bf16_pages[sequence];
  EXPECT_TRUE(int2 == 0 || bf16 == 0);
  EXPECT_LE(int2 + bf16, p.shape.max_pages);
  out->pages = int2 + bf16;
  int64_t layer_offset = p.page_layer_offset;
  if (bf16 > 0) {
    out->history_format = PageFormat::kBf16;
    out->page_head_stride = p.sink.head_stride;
    out->rotation_k = out->rotation_v = out->mean_v = out->shift = nullptr;
    out->position_blocks = 0;
    layer_offset = p.sink.layer_offset;
  }
  std::vector<uint64_t> pages;
  for (int i = 0; i < out->pages; ++i) {
    pages.push_back(p.page_address[int64_t{sequence} * p.shape.max_pages + i] + layer_offset);
  }
  return pages;
}

// Attends slice by slice and stores the rows as `type` at `out`.
void AttendAll(AttentionParams whole, int tokens, OutType type, void* out) {
  const int64_t row = int64_t{whole.q_heads} * whole.shape.head_dim;
  std::vector<float> result(tokens * row);
  const int sink = whole.sink_tokens, recent = whole.recent_tokens;
  const Bf16* q = whole.q;
  const float* offset = whole.offset;
  for (int first = 0; first < tokens; first += kTokensPerTask) {
    const int last = std::min(tokens, first + kTokensPerTask);
    const int behind = tokens - last;
    whole.q_tokens = last - first;
    whole.q = q + first * row;
    whole.out = result.data() + first * row;
    whole.offset = ItemOf(offset, first, int64_t{whole.q_heads} * whole.position_blocks);
    whole.recent_tokens = std::max(0, recent - behind);
    whole.sink_tokens = sink - std::max(0, behind - recent);
    const AlignedBytes scratch = AllocateAligned(kernels::AttentionWorkspaceBytes(whole));
    for (int head = 0; head < whole.kv_heads; ++head) {
      kernels::Attend(whole, head, head + 1, scratch.get());
    }
  }
  if (type == OutType::kF32) {
    std::copy(result.begin(), result.end(), static_cast<float*>(out));
  } else {
    std::transform(result.begin(), result.end(), static_cast<Bf16*>(out),
                   [](float x) { return kernels::Bf16FromFloat(x); });
  }
}

void RunAppend(const kernels::cuda::AppendParams& p) {
  for (int s = 0; s < p.batch; ++s) {
    const int sink = p.lengths.sink_tokens[s], recent = p.lengths.recent_tokens[s];
    if (sink + recent + p.lengths.pages[s] == 0) continue;
    const int count = p.new_tokens == nullptr ? p.q_tokens : p.new_tokens[s];
    for (int t = 0; t < count; ++t) {
      const int at = recent - count + t;
      const bool in_ring = at >= 0;
      const int slot = in_ring ? (p.lengths.recent_begin[s] + at) % p.recent_capacity : sink + at;
      for (int head = 0; head < p.kv_heads; ++head) {
        const int64_t from = s * p.sequence_stride + t * p.token_stride + head * p.head_stride;
        for (const bool value : {false, true}) {
          std::memcpy(Row(in_ring ? p.recent : p.sink, s, head, slot, value),
                      static_cast<const Bf16*>(value ? p.v : p.k) + from, 2 * p.head_dim);
        }
      }
    }
  }
}

uint32_t CopyTile(const kernels::QuantizeParams& p) {
  const size_t elements = size_t{64} * p.shape.head_dim;
  std::memcpy(p.tile, p.k, 2 * elements);
  std::memcpy(p.tile + 2 * elements, p.v, 2 * elements);
  return AllFinite(p.k, elements) && AllFinite(p.v, elements) ? 0 : kernels::kStatusNonFinite;
}

void RunEvict(const kernels::cuda::EvictParams& p) {
  const int64_t dim = p.tile.head_dim;
  ASSERT_LE(*p.windows, p.windows_max);
  for (int w = 0; w < *p.windows; ++w) {
    const int block = p.position_block == nullptr ? 0 : p.position_block[w];
    for (int index = 0; index < p.layers * p.kv_heads; ++index) {
      const int layer = index / p.kv_heads, head = index % p.kv_heads;
      std::vector<Bf16> k(64 * dim), v(64 * dim);
      for (int t = 0; t < 64; ++t) {
        const uint64_t row = p.ring_address[w] + layer * p.ring_layer_stride +
                             head * p.ring_head_stride +
                             (p.ring_begin[w] + t) % p.ring_capacity * p.ring_token_stride;
        std::memcpy(&k[t * dim], reinterpret_cast<const void*>(row), 2 * dim);
        std::memcpy(&v[t * dim], reinterpret_cast<const void*>(row + p.ring_v_offset), 2 * dim);
      }
      const auto transform = [&](const kernels::cuda::EvictTransform& from) {
        const int64_t mean = int64_t{index} * p.position_blocks + block;
        return kernels::RowTransform{
            .rotation = ItemOf(reinterpret_cast<const float*>(from.rotation), index, dim * dim),
            .mean = ItemOf(from.mean, mean, dim),
            .clip = from.clip,
            .feedback = ItemOf(reinterpret_cast<const float*>(from.feedback), index, dim * dim)};
      };
      kernels::QuantizeParams params;
      params.shape = p.tile;
      params.method = p.method;
      params.k = k.data();
      params.v = v.data();
      params.k_stride = params.v_stride = dim;
      params.k_transform = transform(p.k);
      params.v_transform = transform(p.v);
      params.tile =
          reinterpret_cast<uint8_t*>(p.tile_base + p.tile_address[w] + layer * p.tile_layer_stride +
                                     head * p.tile_head_stride);
      const uint32_t status =
          p.format == PageFormat::kInt2 ? kernels::QuantizeTile(params) : CopyTile(params);
      if (p.status != nullptr) p.status[w] |= status;
      if (p.checksums != nullptr) {
        p.checksums[int64_t{w} * p.layers * p.kv_heads + index] =
            Crc32c({reinterpret_cast<const std::byte*>(params.tile), p.tile.bytes(p.format)});
      }
    }
  }
}

// Returns the address of the K or V row of a token in a page, or null if its block is absent.
std::byte* PagedRow(const kernels::cuda::PagedKv& kv, const kernels::cuda::PageTokens& tokens,
                    int page, int token, int layer, int head, bool value) {
  const int position = tokens.first_token[page] + token;
  const int column = position / kv.block_tokens;
  EXPECT_LT(column, kv.blocks_max);
  const int32_t block = kv.block_table[int64_t{tokens.sequence[page]} * kv.blocks_max + column];
  if (block < 0) return nullptr;
  return reinterpret_cast<std::byte*>(
      (value ? kv.v_address : kv.k_address)[layer] + block * kv.block_stride +
      position % kv.block_tokens * kv.token_stride + head * kv.head_stride);
}

// Bytes of the gathered rows of one page: [layers, heads, K and V, token, head_dim].
int64_t GatheredBytes(const kernels::cuda::EvictParams& p) {
  return int64_t{256} * p.tile.head_dim * p.kv_heads * p.layers;
}

// Gathers the rows of all pages into the workspace, page by page.
void RunGather(const kernels::cuda::QuantizeFromParams& p) {
  const kernels::cuda::EvictParams& evict = p.evict;
  const int64_t row = 2 * evict.tile.head_dim, window = GatheredBytes(evict);
  auto* const rows = static_cast<std::byte*>(p.workspace);
  std::memset(rows, 0, window * *evict.windows);
  for (int64_t i = 0; i < window * *evict.windows / row; ++i) {
    const int token = static_cast<int>(i % 64), head = static_cast<int>(i / 128 % evict.kv_heads);
    const int layer = static_cast<int>(i / 128 / evict.kv_heads % evict.layers);
    const std::byte* from = PagedRow(p.kv, p.tokens, static_cast<int>(i * row / window), token,
                                     layer, head, i / 64 % 2 == 1);
    if (from == nullptr) continue;
    if (p.kv.element == kernels::cuda::KvElement::kBf16) {
      std::memcpy(rows + i * row, from, row);
      continue;
    }
    const float* scales = i / 64 % 2 == 1 ? p.v_scale : p.k_scale;
    auto* const to = reinterpret_cast<Bf16*>(rows + i * row);
    for (int64_t j = 0; j < row / 2; ++j) {
      const float value = kernels::Fp8ToFloat(static_cast<uint8_t>(from[j]));
      to[j] = kernels::Bf16FromFloat(value * scales[layer]);
    }
  }
}

// Evicts the windows that RunGather left in the workspace.
void RunEvictGathered(const kernels::cuda::QuantizeFromParams& p) {
  kernels::cuda::EvictParams evict = p.evict;
  const int64_t part = int64_t{128} * evict.tile.head_dim;
  std::vector<uint64_t> address;
  const std::vector<int32_t> begin(*evict.windows);
  for (int w = 0; w < *evict.windows; ++w) {
    address.push_back(reinterpret_cast<uint64_t>(p.workspace) + w * GatheredBytes(evict));
  }
  evict.ring_address = address.data();
  evict.ring_begin = begin.data();
  evict.ring_capacity = 64;
  evict.ring_layer_stride = 2 * part * evict.kv_heads;
  evict.ring_head_stride = 2 * part;
  evict.ring_token_stride = 2 * evict.tile.head_dim;
  evict.ring_v_offset = part;
  RunEvict(evict);
}

// Returns the rows of a tile in the model's basis, K and then V: [2, 64, head_dim].
std::vector<Bf16> RowsOfTile(const kernels::cuda::DequantizeParams& p, int page, int index,
                             const std::byte* tile) {
  const int64_t dim = p.tile.head_dim, elements = 64 * dim;
  std::vector<Bf16> rows(2 * elements);
  if (p.format == PageFormat::kBf16) {
    std::memcpy(rows.data(), tile, rows.size() * sizeof(Bf16));
    return rows;
  }
  const auto rotation = [&](const kernels::cuda::DequantizeTransform& from) {
    return kernels::RowTransform{.rotation = ItemOf(from.rotation, index, dim * dim)};
  };
  std::vector<float> values(2 * elements);
  kernels::DequantizeTileToModel(p.tile, reinterpret_cast<const uint8_t*>(tile), rotation(p.k),
                                 rotation(p.v), values.data(), values.data() + elements);
  const int block = p.position_block == nullptr ? 0 : p.position_block[page];
  for (int64_t i = 0; i < 2 * elements; ++i) {
    const float* mean =
        ItemOf((i < elements ? p.k : p.v).mean, int64_t{index} * p.position_blocks + block, dim);
    rows[i] = kernels::Bf16FromFloat(values[i] + (mean == nullptr ? 0.0f : mean[i % dim]));
  }
  return rows;
}

void RunDequantize(const kernels::cuda::DequantizeParams& p) {
  const int64_t dim = p.tile.head_dim;
  ASSERT_LE(*p.pages, p.pages_max);
  for (int page = 0; page < *p.pages; ++page) {
    for (int index = 0; index < p.layers * p.kv_heads; ++index) {
      const int layer = index / p.kv_heads, head = index % p.kv_heads;
      const auto* tile = reinterpret_cast<const std::byte*>(
          p.page_address[page] + layer * p.tile_layer_stride + head * p.tile_head_stride);
      const std::vector<Bf16> rows = RowsOfTile(p, page, index, tile);
      for (int row = 0; row < 128; ++row) {
        std::byte* to = PagedRow(p.kv, p.tokens, page, row % 64, layer, head, row >= 64);
        if (to == nullptr) continue;
        if (p.kv.element == kernels::cuda::KvElement::kBf16) {
          std::memcpy(to, &rows[row * dim], 2 * dim);
          continue;
        }
        const float scale = (row >= 64 ? p.v_scale : p.k_scale)[layer];
        for (int64_t j = 0; j < dim; ++j) {
          const float value = kernels::Bf16ToFloat(rows[row * dim + j]) / scale;
          to[j] = static_cast<std::byte>(kernels::Fp8FromFloat(value));
        }
      }
    }
  }
}

void RunPlan(const kernels::cuda::DecodeShape& shape, const kernels::cuda::DecodeLengths& lengths,
             int window, void* plan) {
  auto* out = static_cast<int32_t*>(plan);
  *out++ = window;
  for (int s = 0; s < shape.batch; ++s) {
    *out++ = lengths.sink_tokens[s];
    *out++ = lengths.pages[s];
    *out++ = lengths.recent_tokens[s];
    *out++ = lengths.recent_begin[s];
    *out++ = lengths.bf16_pages == nullptr ? 0 : lengths.bf16_pages[s];
  }
}

void RunDecode(const kernels::cuda::DecodeAttentionParams& p) {
  const int64_t row = int64_t{p.shape.q_heads} * p.shape.tile.head_dim;
  const size_t element = p.out_type == OutType::kF32 ? 4 : 2;
  std::vector<int32_t> planned(1 + 5 * p.shape.batch);
  RunPlan(p.shape, p.lengths, p.window, planned.data());
  EXPECT_EQ(std::memcmp(planned.data(), p.plan, planned.size() * 4), 0)
      << "the plan is of other lengths, or of another window";
  for (int s = 0; s < p.shape.batch; ++s) {
    AttentionParams a = StaticOf(p);
    a.sink_tokens = p.lengths.sink_tokens[s];
    const std::vector<uint64_t> pages = HistoryOf(p, s, &a);
    a.page_address = pages.data();
    a.recent_tokens = p.lengths.recent_tokens[s];
    if (a.sink_tokens + a.pages + a.recent_tokens == 0) continue;
    ASSERT_LE(a.sink_tokens + a.recent_tokens, p.shape.window_tokens_max);
    a.sink_k = reinterpret_cast<const Bf16*>(Row(p.sink, s, 0, 0, false));
    a.sink_v = reinterpret_cast<const Bf16*>(Row(p.sink, s, 0, 0, true));
    a.sink_head_stride = p.sink.head_stride / 2;
    a.sink_token_stride = p.sink.token_stride / 2;
    a.recent_begin = p.lengths.recent_begin[s];
    a.recent_capacity = p.recent_capacity;
    a.recent_k = reinterpret_cast<const Bf16*>(Row(p.recent, s, 0, 0, false));
    a.recent_v = reinterpret_cast<const Bf16*>(Row(p.recent, s, 0, 0, true));
    a.recent_head_stride = p.recent.head_stride / 2;
    a.recent_token_stride = p.recent.token_stride / 2;
    const int64_t first = int64_t{s} * p.shape.q_tokens;
    a.q = static_cast<const Bf16*>(p.q) + first * row;
    a.offset = ItemOf(p.offset, first, int64_t{p.shape.q_heads} * p.position_blocks);
    AttendAll(a, p.shape.q_tokens, p.out_type,
              static_cast<std::byte*>(p.out) + first * row * element);
  }
}

// The sequence's BF16 rows in order: the sink and its fresh rows, then the others. [heads, n, dim]
struct GatheredRows {
  std::vector<Bf16> sink[2];
  std::vector<Bf16> recent[2];
};

void RunPrefill(const kernels::cuda::PrefillAttentionParams& p) {
  const int64_t dim = p.shape.tile.head_dim, row = int64_t{p.shape.q_heads} * dim;
  const size_t element = p.out_type == OutType::kF32 ? 4 : 2;
  for (int s = 0; s < p.shape.batch; ++s) {
    const int fresh = p.lengths.fresh_tokens[s];
    if (fresh == 0) continue;
    ASSERT_LE(fresh, p.shape.fresh_max);
    const int begin = p.lengths.fresh_begin[s], older = p.lengths.recent_tokens[s];
    const int old_sink = p.lengths.sink_tokens[s];
    const int row_begin = p.lengths.fresh_row == nullptr ? begin : p.lengths.fresh_row[s];
    AttentionParams a = StaticOf(p);
    const std::vector<uint64_t> pages = HistoryOf(p, s, &a);
    a.page_address = pages.data();
    a.sink_tokens = a.pages + older > 0 ? old_sink : std::min(64, old_sink + fresh);
    const int moved = a.sink_tokens - old_sink;
    a.recent_tokens = older + fresh - moved;
    GatheredRows rows;
    for (int part = 0; part < 2; ++part) {
      const auto* given = static_cast<const Bf16*>(part == 0 ? p.k : p.v);
      for (int head = 0; head < p.shape.kv_heads; ++head) {
        const auto add = [&](std::vector<Bf16>& to, const void* from) {
          const auto* values = static_cast<const Bf16*>(from);
          to.insert(to.end(), values, values + dim);
        };
        const auto add_fresh = [&](std::vector<Bf16>& to, int t) {
          add(to, given + (row_begin + t) * p.token_stride + head * p.head_stride);
        };
        for (int t = 0; t < old_sink; ++t) add(rows.sink[part], Row(p.sink, s, head, t, part == 1));
        for (int t = 0; t < moved; ++t) add_fresh(rows.sink[part], t);
        for (int t = 0; t < older; ++t) {
          const int slot = (p.lengths.recent_begin[s] + t) % p.recent_capacity;
          add(rows.recent[part], Row(p.recent, s, head, slot, part == 1));
        }
        for (int t = moved; t < fresh; ++t) add_fresh(rows.recent[part], t);
      }
    }
    a.sink_k = rows.sink[0].data();
    a.sink_v = rows.sink[1].data();
    a.sink_head_stride = a.sink_tokens * dim;
    a.recent_k = rows.recent[0].data();
    a.recent_v = rows.recent[1].data();
    a.recent_capacity = a.recent_tokens;
    a.recent_head_stride = a.recent_tokens * dim;
    a.sink_token_stride = a.recent_token_stride = dim;
    a.q = static_cast<const Bf16*>(p.q) + begin * row;
    a.offset = ItemOf(p.offset, begin, int64_t{p.shape.q_heads} * p.position_blocks);
    AttendAll(a, fresh, p.out_type, static_cast<std::byte*>(p.out) + begin * row * element);
  }
}

void RunQueryOffsets(const kernels::cuda::QueryOffsetsParams& p) {
  const int group = p.q_heads / p.kv_heads;
  for (int64_t row = 0; row < int64_t{p.tokens} * p.q_heads; ++row) {
    const int64_t token = row / p.q_heads, head = row % p.q_heads;
    if (p.held_head != nullptr && p.held_head[token / p.held_tokens] == head / group + 1) {
      const int64_t to = token % p.held_tokens * group + head % group;
      std::copy_n(p.q + row * p.head_dim, p.head_dim, p.held + to * p.head_dim);
    }
    const float* mean =
        p.mean_k + row % p.q_heads / group * int64_t{p.head_dim} * p.position_blocks;
    float* out = p.offset + row * p.position_blocks;
    std::fill_n(out, p.position_blocks, 0.0f);
    for (int i = 0; i < p.head_dim; ++i) {
      const float x = kernels::Bf16ToFloat(p.q[row * p.head_dim + i]);
      for (int b = 0; b < p.position_blocks; ++b) out[b] += x * mean[i * p.position_blocks + b];
    }
  }
}

}  // namespace

absl::Status SimulatedKernels::PrepareRotation(const float* rotation, int head_dim, int matrices,
                                               kernels::cuda::EvictRotation* prepared,
                                               DeviceStream stream) {
  return device_.Enqueue(stream, [=, bytes = RotationBytes(head_dim) * matrices] {
    std::memcpy(reinterpret_cast<void*>(prepared), rotation, bytes);
  });
}

absl::Status SimulatedKernels::PrepareFeedback(const float* feedback, int head_dim, int matrices,
                                               kernels::cuda::EvictFeedback* prepared,
                                               DeviceStream stream) {
  return device_.Enqueue(stream, [=, bytes = FeedbackBytes(head_dim) * matrices] {
    std::memcpy(reinterpret_cast<void*>(prepared), feedback, bytes);
  });
}

absl::Status SimulatedKernels::Append(const kernels::cuda::AppendParams& params,
                                      DeviceStream stream) {
  if (params.q_tokens < 1 || params.q_tokens > kernels::cuda::kAppendTokensMax) {
    return absl::InvalidArgumentError("Append");
  }
  return device_.Enqueue(stream, [params] { RunAppend(params); });
}

absl::Status SimulatedKernels::Evict(const kernels::cuda::EvictParams& params,
                                     DeviceStream stream) {
  return device_.Enqueue(stream, [params] { RunEvict(params); });
}

absl::Status SimulatedKernels::Plan(const kernels::cuda::DecodeShape& shape,
                                    const kernels::cuda::DecodeLengths& lengths, int window,
                                    void* plan, DeviceStream stream) {
  return device_.Enqueue(stream, [=] { RunPlan(shape, lengths, window, plan); });
}

absl::Status SimulatedKernels::Decode(const kernels::cuda::DecodeAttentionParams& params,
                                      DeviceStream stream) {
  return device_.Enqueue(stream, [params] { RunDecode(params); });
}

absl::Status SimulatedKernels::Prefill(const kernels::cuda::PrefillAttentionParams& params,
                                       DeviceStream stream) {
  return device_.Enqueue(stream, [params] { RunPrefill(params); });
}

void SimulatedKernels::RunFetch(const kernels::cuda::FetchParams& p) {
  for (int page = 0; page < p.pages; ++page) {
    for (int layer = p.layer_begin; layer < p.layer_end; ++layer) {
      for (int i = 0; i < p.tiles_per_layer; ++i) {
        const uint64_t to = p.to[page] + layer * p.to_layer_stride + i * p.tile_bytes;
        const uint64_t from =
            p.from == nullptr ? to
                              : p.from[page] + layer * p.from_layer_stride[page] + i * p.tile_bytes;
        ASSERT_TRUE(device_.KernelMayRead(from, p.tile_bytes)) << "a kernel reads host memory";
        const auto* tile = reinterpret_cast<const std::byte*>(from);
        if (from != to) {
          std::memcpy(reinterpret_cast<void*>(to), tile, p.tile_bytes);
          device_.fetched_from_host_.fetch_add(1);
        }
        const uint32_t checksum = Crc32c({tile, p.tile_bytes});
        if (checksum !=
            p.checksums[layer * p.checksums_layer_stride + page * p.tiles_per_layer + i])
          p.status[page] = 1;
      }
    }
  }
}

absl::Status SimulatedKernels::Fetch(const kernels::cuda::FetchParams& params,
                                     DeviceStream stream) {
  if (params.layer_begin >= params.layer_end) return absl::InvalidArgumentError("Fetch");
  return device_.Enqueue(stream, [this, params] { RunFetch(params); });
}

absl::Status SimulatedKernels::QueryOffsets(const kernels::cuda::QueryOffsetsParams& params,
                                            DeviceStream stream) {
  return device_.Enqueue(stream, [params] { RunQueryOffsets(params); });
}

size_t SimulatedKernels::QuantizeFromWorkspaceBytes(const kernels::cuda::EvictParams& evict) const {
  return static_cast<size_t>(GatheredBytes(evict)) * evict.windows_max;
}

absl::Status SimulatedKernels::QuantizeFrom(const kernels::cuda::QuantizeFromParams& params,
                                            DeviceStream stream) {
  quantize_from_launches.fetch_add(1);
  CRUMB_RETURN_IF_ERROR(device_.Enqueue(stream, [params] { RunGather(params); }));
  return device_.Enqueue(stream, [params] { RunEvictGathered(params); });
}

absl::Status SimulatedKernels::Dequantize(const kernels::cuda::DequantizeParams& params,
                                          DeviceStream stream) {
  dequantize_launches.fetch_add(1);
  return device_.Enqueue(stream, [params] { RunDequantize(params); });
}

}  // namespace crumb::client
