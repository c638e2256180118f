// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <random>
#include <span>
#include <vector>

#include "common/page_key.h"
#include "crumb/transfer.h"
#include "kernels/bf16.h"

namespace crumb::client {

// Length of the sequence that an EngineCache holds.
inline constexpr int kEnginePages = 7;
inline constexpr int kEngineTokens = kEnginePages * kPageTokens;

// The layouts in which engines keep K and V.
enum class Layout { kTokenMajor, kHeadMajor, kInterleaved, kTransposedKeys };

struct CacheShape {
  Layout layout;
  int block_tokens;
};

inline void PrintTo(const CacheShape& shape, std::ostream* out) {
  *out << static_cast<int>(shape.layout) << "/" << shape.block_tokens;
}

// A paged cache of one layout, filled with random values, and a block table with the sequence's
// blocks in random order. With FP8 elements, which are finite ones, it uses half of its memory.
class EngineCache {
 public:
  EngineCache(const WorkerOptions& options, const CacheShape& shape, uint32_t seed,
              RowElement element = RowElement::kBf16)
      : options_(options), shape_(shape), element_(element) {
    const int used = (kEngineTokens + shape.block_tokens - 1) / shape.block_tokens;
    blocks_ = used + 5;
    std::mt19937 random(seed);
    std::vector<int64_t> order(blocks_);
    for (int64_t i = 0; i < blocks_; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    table_.assign(order.begin(), order.begin() + used);
    const int64_t values =
        blocks_ * shape.block_tokens * options.own_kv_heads() * options.head_dim * 2;
    std::normal_distribution<float> normal;
    for (int layer = 0; layer < options.own_layers(); ++layer) {
      memory_.emplace_back(values);
      for (kernels::Bf16& value : memory_.back()) value = kernels::Bf16FromFloat(normal(random));
      if (element == RowElement::kBf16) continue;
      auto* const codes = reinterpret_cast<uint8_t*>(memory_.back().data());
      for (int64_t i = 0; i < 2 * values; ++i) {
        codes[i] = static_cast<uint8_t>(random() % 127 | (random() % 2 << 7));
      }
    }
  }

  PagedCache View() {
    std::vector<kernels::Bf16*> bases;
    for (std::vector<kernels::Bf16>& memory : memory_) bases.push_back(memory.data());
    return ViewOf(bases);
  }
  // Describes copies of the layers that are elsewhere in memory.
  PagedCache ViewOf(const std::vector<kernels::Bf16*>& bases) const {
    PagedCache cache{
        .layers = {}, .blocks = blocks_, .block_tokens = shape_.block_tokens, .element = element_};
    for (kernels::Bf16* base : bases) {
      PagedCache::Layer layer = LayerOf(base);
      if (element_ == RowElement::kFp8E4m3) {
        const int number = static_cast<int>(cache.layers.size());
        for (PagedRows* rows : {&layer.k, &layer.v}) {
          const int64_t offset = static_cast<kernels::Bf16*>(rows->base) - base;
          rows->base = reinterpret_cast<std::byte*>(base) + offset;
          rows->scale = Scale(number, rows == &layer.v);
        }
      }
      cache.layers.push_back(layer);
    }
    return cache;
  }

  // The factor of FP8 elements.
  static float Scale(int layer, bool value) { return (value ? 0.37f : 1.75f) / (1 + layer); }
  uint8_t& CodeAt(int layer, bool value, int head, int token, int element) {
    kernels::Bf16& place = At(layer, value, head, token, element);
    return reinterpret_cast<uint8_t*>(memory_[layer].data())[&place - memory_[layer].data()];
  }
  kernels::Bf16& At(int layer, bool value, int head, int token, int element) {
    const PagedCache::Layer view = LayerOf(memory_[layer].data());
    const PagedRows& rows = value ? view.v : view.k;
    return static_cast<kernels::Bf16*>(rows.base)[OffsetOf(rows, head, token, element)];
  }
  // Returns the place of an element in rows of this layout, in elements.
  int64_t OffsetOf(const PagedRows& rows, int head, int token, int element) const {
    return table_[token / shape_.block_tokens] * rows.block_stride + head * rows.head_stride +
           token % shape_.block_tokens * rows.token_stride + element * rows.element_stride;
  }
  std::span<const int64_t> table() const { return table_; }
  std::vector<std::vector<kernels::Bf16>>& memory() { return memory_; }

 private:
  PagedCache::Layer LayerOf(kernels::Bf16* base) const {
    const int64_t dim = options_.head_dim, heads = options_.own_kv_heads();
    const int64_t tokens = shape_.block_tokens, block = 2 * tokens * heads * dim;
    switch (shape_.layout) {
      case Layout::kTokenMajor:  // [blocks, K and V, tokens, heads, dim]
        return {{base, block, dim, heads * dim, 1}, {base + block / 2, block, dim, heads * dim, 1}};
      case Layout::kHeadMajor:  // [blocks, K and V, heads, tokens, dim]
        return {{base, block, tokens * dim, dim, 1},
                {base + block / 2, block, tokens * dim, dim, 1}};
      case Layout::kInterleaved:  // [blocks, heads, tokens, K row and V row]
        return {{base, block, 2 * tokens * dim, 2 * dim, 1},
                {base + dim, block, 2 * tokens * dim, 2 * dim, 1}};
      case Layout::kTransposedKeys:  // [blocks, heads, K [dim, tokens] and V [tokens, dim]]
        return {{base, block, 2 * tokens * dim, 1, tokens},
                {base + tokens * dim, block, 2 * tokens * dim, dim, 1}};
    }
    return {};
  }

  const WorkerOptions& options_;
  const CacheShape shape_;
  const RowElement element_;
  int64_t blocks_ = 0;
  std::vector<int64_t> table_;
  std::vector<std::vector<kernels::Bf16>> memory_;  // per layer
};

}  // namespace crumb::client
