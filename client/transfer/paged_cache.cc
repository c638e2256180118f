// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/paged_cache.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "common/page_key.h"
#include "fmt/format.h"
#include "kernels/fp8.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

// Calls body(first row of the page, address of the rows of consecutive tokens, count) for each
// range of the page's tokens that lies in one block.
template <typename Element, typename Body>
void ForEachStretch(const PagedRows& rows, int block_tokens, std::span<const int64_t> blocks,
                    int page, int head, const Body& body) {
  int64_t token = int64_t{page} * kPageTokens;
  for (int row = 0; row < kPageTokens;) {
    const int64_t offset = token % block_tokens;
    const int count = static_cast<int>(std::min<int64_t>(kPageTokens - row, block_tokens - offset));
    Element* const at = static_cast<Element*>(rows.base) +
                        blocks[token / block_tokens] * rows.block_stride + head * rows.head_stride +
                        offset * rows.token_stride;
    body(row, at, count);
    row += count;
    token += count;
  }
}

// Reads the elements of a page with `convert`, which makes them BF16.
template <typename Element, typename Convert>
void Gather(const PagedRows& rows, int block_tokens, std::span<const int64_t> blocks, int page,
            int head, int head_dim, Bf16* to, const Convert& convert) {
  ForEachStretch<Element>(
      rows, block_tokens, blocks, page, head, [&](int row, const Element* at, int count) {
        if (rows.element_stride == 1) {
          for (int i = 0; i < count; ++i) {
            const Element* const from = at + i * rows.token_stride;
            std::transform(from, from + head_dim, to + int64_t{row + i} * head_dim, convert);
          }
          return;
        }
        // The tokens of a transposed plane are adjacent in memory, so that the inner loop follows
        // them.
        for (int element = 0; element < head_dim; ++element) {
          const Element* const column = at + element * rows.element_stride;
          for (int i = 0; i < count; ++i) {
            to[int64_t{row + i} * head_dim + element] = convert(column[i * rows.token_stride]);
          }
        }
      });
}

// Writes the elements of a page with `convert`, which makes them from BF16.
template <typename Element, typename Convert>
void Scatter(const Bf16* from, int block_tokens, std::span<const int64_t> blocks, int page,
             int head, int head_dim, const PagedRows& rows, const Convert& convert) {
  ForEachStretch<Element>(
      rows, block_tokens, blocks, page, head, [&](int row, Element* at, int count) {
        if (rows.element_stride == 1) {
          for (int i = 0; i < count; ++i) {
            const Bf16* const given = from + int64_t{row + i} * head_dim;
            std::transform(given, given + head_dim, at + i * rows.token_stride, convert);
          }
          return;
        }
        for (int element = 0; element < head_dim; ++element) {
          Element* const column = at + element * rows.element_stride;
          for (int i = 0; i < count; ++i) {
            column[i * rows.token_stride] = convert(from[int64_t{row + i} * head_dim + element]);
          }
        }
      });
}

constexpr auto kSame = [](Bf16 x) { return x; };

// The BF16 values of all FP8 codes under a scale.
std::array<Bf16, 256> ValuesOf(float scale) {
  std::array<Bf16, 256> values;
  for (int code = 0; code < 256; ++code) {
    values[code] = kernels::Bf16FromFloat(kernels::Fp8ToFloat(static_cast<uint8_t>(code)) * scale);
  }
  return values;
}

}  // namespace

absl::Status CheckCache(const PagedCache& cache, int layers) {
  if (static_cast<int>(cache.layers.size()) != layers) {
    return absl::InvalidArgumentError(
        fmt::format("the paged cache has {} layers, this rank {}", cache.layers.size(), layers));
  }
  if (cache.blocks <= 0 || cache.block_tokens <= 0) {
    return absl::InvalidArgumentError("a paged cache has at least one block of at least one token");
  }
  for (const PagedCache::Layer& layer : cache.layers) {
    for (const PagedRows* rows : {&layer.k, &layer.v}) {
      if (rows->base == nullptr) return absl::InvalidArgumentError("a layer of the cache is null");
      if (rows->block_stride == 0 || rows->token_stride == 0 || rows->element_stride == 0) {
        return absl::InvalidArgumentError("a stride of the paged cache is 0");
      }
      const bool scaled = cache.element == RowElement::kFp8E4m3;
      if (scaled && !(std::isfinite(rows->scale) && rows->scale > 0)) {
        return absl::InvalidArgumentError(fmt::format(
            "the scale of FP8 rows is {}, and must be finite and greater than 0", rows->scale));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBlocks(const PagedCache& cache, std::span<const int64_t> blocks, int first_page,
                         int end_page) {
  const int64_t first = int64_t{first_page} * kPageTokens / cache.block_tokens;
  const int64_t end =
      (int64_t{end_page} * kPageTokens + cache.block_tokens - 1) / cache.block_tokens;
  if (static_cast<int64_t>(blocks.size()) < end) {
    return absl::InvalidArgumentError(
        fmt::format("the block table has {} blocks of {} tokens, and page {} ends in block {}",
                    blocks.size(), cache.block_tokens, end_page - 1, end - 1));
  }
  for (int64_t i = first; i < end; ++i) {
    if (blocks[i] < 0 || blocks[i] >= cache.blocks) {
      return absl::InvalidArgumentError(fmt::format(
          "block {} of the table is {}, and the cache has {} blocks", i, blocks[i], cache.blocks));
    }
  }
  return absl::OkStatus();
}

void GatherPage(const PagedRows& rows, RowElement element, int block_tokens,
                std::span<const int64_t> blocks, int page, int head, int head_dim, Bf16* to) {
  if (element == RowElement::kBf16) {
    return Gather<Bf16>(rows, block_tokens, blocks, page, head, head_dim, to, kSame);
  }
  const std::array<Bf16, 256> values = ValuesOf(rows.scale);
  Gather<uint8_t>(rows, block_tokens, blocks, page, head, head_dim, to,
                  [&](uint8_t code) { return values[code]; });
}

void ScatterPage(const Bf16* from, RowElement element, int block_tokens,
                 std::span<const int64_t> blocks, int page, int head, int head_dim,
                 const PagedRows& rows) {
  if (element == RowElement::kBf16) {
    return Scatter<Bf16>(from, block_tokens, blocks, page, head, head_dim, rows, kSame);
  }
  Scatter<uint8_t>(from, block_tokens, blocks, page, head, head_dim, rows, [&](Bf16 x) {
    return kernels::Fp8FromFloat(kernels::Bf16ToFloat(x) / rows.scale);
  });
}

}  // namespace crumb::client
