// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cpu/attention_case.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/reference/reference.h"

namespace crumb::kernels {
namespace {

constexpr int kTileAlignment = 128;
constexpr int kPositionBlocks = 2;

}  // namespace

AttentionCase::AttentionCase(const AttentionSizes& sizes, RandomData* random) {
  params.shape = sizes.shape;
  params.history_format = sizes.format;
  params.q_tokens = sizes.q_tokens;
  params.kv_heads = sizes.kv_heads;
  params.q_heads = sizes.kv_heads * sizes.heads;
  params.soft_cap = sizes.soft_cap;
  params.window = sizes.window;
  const size_t rows = static_cast<size_t>(sizes.q_tokens) * params.q_heads;
  q = random->Rows(rows * sizes.shape.head_dim);
  out.assign(rows * sizes.shape.head_dim, -7.0f);
  lse.assign(rows, -7.0f);
  params.q = q.data();
  params.out = out.data();
  params.lse = lse.data();
  MakeWindows(sizes, random);
  if (sizes.transforms) MakeTransforms(sizes, random);
  if (sizes.sink_logit) {
    sink_logit = random->Floats(params.q_heads, 2.0f);
    params.sink_logit = sink_logit.data();
  }
  MakePages(sizes, random);
}

void AttentionCase::MakeWindows(const AttentionSizes& sizes, RandomData* random) {
  const int d = sizes.shape.head_dim;
  const size_t sink = static_cast<size_t>(sizes.kv_heads) * sizes.sink_tokens * d;
  const size_t recent = static_cast<size_t>(sizes.kv_heads) * sizes.recent_capacity * d;
  sink_k = random->Rows(sink, sizes.key_deviation);
  sink_v = random->Rows(sink);
  recent_k = random->Rows(recent, sizes.key_deviation);
  recent_v = random->Rows(recent);
  // Sink: token-major, all heads of a token together. Recent: head-major.
  params.sink_tokens = sizes.sink_tokens;
  params.sink_k = sink_k.data();
  params.sink_v = sink_v.data();
  params.sink_head_stride = d;
  params.sink_token_stride = static_cast<int64_t>(sizes.kv_heads) * d;
  params.recent_tokens = sizes.recent_tokens;
  params.recent_begin = sizes.recent_begin;
  params.recent_capacity = sizes.recent_capacity;
  params.recent_k = recent_k.data();
  params.recent_v = recent_v.data();
  params.recent_head_stride = static_cast<int64_t>(sizes.recent_capacity) * d;
  params.recent_token_stride = d;
}

void AttentionCase::MakeTransforms(const AttentionSizes& sizes, RandomData* random) {
  const int d = sizes.shape.head_dim;
  for (int head = 0; head < sizes.kv_heads; ++head) {
    for (std::vector<float>* rotations : {&rotation_k, &rotation_v}) {
      const std::vector<float> rotation = random->Orthogonal(d);
      rotations->insert(rotations->end(), rotation.begin(), rotation.end());
    }
  }
  mean_k = random->Floats(static_cast<size_t>(sizes.kv_heads) * d, 0.5f);
  mean_v = random->Floats(static_cast<size_t>(sizes.kv_heads) * d, 0.5f);
  offset =
      random->Floats(static_cast<size_t>(sizes.q_tokens) * params.q_heads * kPositionBlocks, 3.0f);
  shift = random->Floats(params.q_heads, 0.3f);
  params.rotation_k = rotation_k.data();
  params.rotation_v = rotation_v.data();
  params.mean_v = mean_v.data();
  params.offset = offset.data();
  params.position_blocks = kPositionBlocks;
  params.pages_per_position_block = 1;
  params.shift = shift.data();
}

void AttentionCase::MakePages(const AttentionSizes& sizes, RandomData* random) {
  const TileShape& shape = sizes.shape;
  const int d = shape.head_dim;
  const size_t elements = static_cast<size_t>(shape.tokens) * d;
  params.page_head_stride = static_cast<int64_t>(shape.bytes(sizes.format));
  for (int page = 0; page < sizes.pages; ++page) {
    pages_.emplace_back(params.page_head_stride * sizes.kv_heads + kTileAlignment);
    const auto begin = reinterpret_cast<uint64_t>(pages_.back().data());
    page_address_.push_back((begin + kTileAlignment - 1) / kTileAlignment * kTileAlignment);
  }
  params.pages = sizes.pages;
  params.page_address = page_address_.data();
  for (int page = 0; page < sizes.pages; ++page) {
    for (int head = 0; head < sizes.kv_heads; ++head) {
      const std::vector<Bf16> k = random->Rows(elements, sizes.key_deviation);
      const std::vector<Bf16> v = random->Rows(elements);
      if (sizes.format == PageFormat::kBf16) {
        std::memcpy(Tile(page, head), k.data(), elements * sizeof(Bf16));
        std::memcpy(Tile(page, head) + elements * sizeof(Bf16), v.data(), elements * sizeof(Bf16));
        continue;
      }
      QuantizeParams quantize;
      quantize.shape = shape;
      quantize.k = k.data();
      quantize.v = v.data();
      quantize.k_stride = quantize.v_stride = d;
      if (sizes.transforms) {
        quantize.k_transform = {&rotation_k[head * d * d], &mean_k[head * d], 0.96f};
        quantize.v_transform = {&rotation_v[head * d * d], &mean_v[head * d], 0.92f};
      }
      quantize.tile = Tile(page, head);
      ASSERT_EQ(QuantizeTile(quantize), 0u);
    }
  }
}

uint8_t* AttentionCase::Tile(int page, int head) {
  return reinterpret_cast<uint8_t*>(page_address_[page]) + head * params.page_head_stride;
}

void AttentionCase::Run() {
  constexpr size_t kGuard = 256;
  constexpr uint8_t kGuardByte = 0x5a;
  const size_t bytes = AttentionWorkspaceBytes(params);
  const size_t allocated = (bytes + kGuard + 63) / 64 * 64;
  const std::unique_ptr<uint8_t, decltype(&std::free)> workspace(
      static_cast<uint8_t*>(std::aligned_alloc(64, allocated)), &std::free);
  // The workspace is filled with NaN: nothing may be read before it is written.
  std::memset(workspace.get(), 0xff, bytes);
  std::memset(workspace.get() + bytes, kGuardByte, allocated - bytes);
  Attend(params, 0, params.kv_heads, workspace.get());
  for (size_t i = bytes; i < allocated; ++i) ASSERT_EQ(workspace.get()[i], kGuardByte);
}

void AttentionCase::ExpectMatchesReference(double tolerance) {
  Run();
  const int d = params.shape.head_dim;
  for (int token = 0; token < params.q_tokens; ++token) {
    for (int head = 0; head < params.q_heads; ++head) {
      const reference::AttentionRow row = reference::Attend(params, token, head);
      const int index = token * params.q_heads + head;
      double error = 0.0, norm = 0.0;
      for (int i = 0; i < d; ++i) {
        const double difference = params.out[static_cast<int64_t>(index) * d + i] - row.out[i];
        error += difference * difference;
        norm += row.out[i] * row.out[i];
      }
      ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm))
          << "token " << token << " head " << head;
      if (params.lse != nullptr) {
        ASSERT_NEAR(params.lse[index], row.lse, tolerance) << "token " << token << " head " << head;
      }
    }
  }
}

}  // namespace crumb::kernels
