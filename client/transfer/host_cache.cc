// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/host_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "client/transfer/paged_cache.h"
#include "client/worker/segment_rule.h"
#include "common/page_key.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "kernels/tile_codec.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::PageFormat;

// The rows of one (layer, KV head) of a page.
class PageRows {
 public:
  explicit PageRows(int head_dim)
      : head_dim_(head_dim), rows_(size_t{2} * kPageTokens * head_dim) {}

  Bf16* k() { return rows_.data(); }
  Bf16* v() { return rows_.data() + size_t{kPageTokens} * head_dim_; }
  WindowRows window() { return {.k = k(), .v = v(), .stride = head_dim_}; }

 private:
  const int head_dim_;
  std::vector<Bf16> rows_;
};

// Rows of pages in blocks of `block_tokens` rows.
struct RowBlocks {
  int block_tokens = 0;
  int head_dim = 0;
  RowElement element = RowElement::kBf16;

  void Write(PageRows& rows, std::span<const int64_t> blocks, int page, int head,
             const PagedCache::Layer& to) const {
    ScatterPage(rows.k(), element, block_tokens, blocks, page, head, head_dim, to.k);
    ScatterPage(rows.v(), element, block_tokens, blocks, page, head, head_dim, to.v);
  }
  void Read(const PagedCache::Layer& from, std::span<const int64_t> blocks, int page, int head,
            PageRows& rows) const {
    GatherPage(from.k, element, block_tokens, blocks, page, head, head_dim, rows.k());
    GatherPage(from.v, element, block_tokens, blocks, page, head, head_dim, rows.v());
  }
};

class PagedHostCache final : public HostCache {
 public:
  PagedHostCache(PagedCache cache, const WorkerOptions& options, const CpuBackend& backend)
      : cache_(std::move(cache)),
        rows_({.block_tokens = cache_.block_tokens,
               .head_dim = options.head_dim,
               .element = cache_.element}),
        backend_(backend) {}

  absl::Status CheckBlocks(std::span<const int64_t> blocks, int first_page,
                           int end_page) const override {
    return client::CheckBlocks(cache_, blocks, first_page, end_page);
  }
  absl::Status CheckFormat(PageFormat) const override { return absl::OkStatus(); }
  bool ComputedOverInt2(int) const override { return false; }

  void LoadTile(const Page& page, int layer, int head,
                std::span<const int64_t> blocks) const override {
    PageRows rows(rows_.head_dim);
    backend_.ReadTile(page, layer, head, rows.k(), rows.v());
    rows_.Write(rows, blocks, static_cast<int>(page.position), head, cache_.layers[layer]);
  }
  uint32_t StoreTile(std::span<const int64_t> blocks, int layer, int head,
                     const Page& page) const override {
    PageRows rows(rows_.head_dim);
    rows_.Read(cache_.layers[layer], blocks, static_cast<int>(page.position), head, rows);
    return backend_.StoreTile(rows.window(), layer, head, page);
  }

 private:
  const PagedCache cache_;
  const RowBlocks rows_;
  const CpuBackend& backend_;
};

// Page 0 of a sequence is in its sink blocks, as BF16 rows. Each other page is a history block,
// whose tiles are those of the page.
class BlockHostCache final : public HostCache {
 public:
  BlockHostCache(BlockCache cache, const WorkerOptions& options, const CpuBackend& backend)
      : cache_(std::move(cache)),
        options_(options),
        geometry_(BlockGeometryOf(options)),
        rows_({.block_tokens = geometry_.rows_per_block, .head_dim = options.head_dim}),
        backend_(backend) {}

  absl::Status CheckBlocks(std::span<const int64_t> blocks, int first_page,
                           int end_page) const override {
    // A sequence whose only page is the first one has a history block for it as well.
    const int64_t needed = int64_t{geometry_.sink_blocks} + end_page;
    if (static_cast<int64_t>(blocks.size()) < needed) {
      return absl::InvalidArgumentError(
          fmt::format("the table has {} blocks, and {} pages have {} sink blocks and as many "
                      "history blocks as pages",
                      blocks.size(), end_page, geometry_.sink_blocks));
    }
    const auto check = [&](int64_t begin, int64_t end) -> absl::Status {
      for (int64_t i = begin; i < end; ++i) {
        if (blocks[i] >= 0 && blocks[i] < cache_.layers[0].blocks) continue;
        return absl::InvalidArgumentError(
            fmt::format("block {} of the table is {}, and the pool has {} blocks", i, blocks[i],
                        cache_.layers[0].blocks));
      }
      return absl::OkStatus();
    };
    if (first_page == 0) CRUMB_RETURN_IF_ERROR(check(0, geometry_.sink_blocks));
    return check(geometry_.sink_blocks + std::max(1, first_page), needed);
  }

  absl::Status CheckFormat(PageFormat format) const override {
    if (format == PageFormat::kInt2) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "INT2 pages of this keyspace are switched off, and the engine's blocks have no others");
  }
  bool ComputedOverInt2(int number) const override {
    const SegmentRule rule{.recent_tokens = options_.recent_tokens};
    return rule.HistoryEnd((number + 1) * kPageTokens) > kPageTokens;
  }

  void LoadTile(const Page& page, int layer, int head,
                std::span<const int64_t> blocks) const override {
    std::byte* const tile = page.layer(layer) + page.tile_bytes * head;
    if (page.position > 0 && page.format == PageFormat::kInt2) {
      std::memcpy(TileOf(page, layer, head, blocks), tile, page.tile_bytes);
      return;
    }
    PageRows rows(rows_.head_dim);
    backend_.ReadTile(page, layer, head, rows.k(), rows.v());
    if (page.position == 0) {
      rows_.Write(rows, blocks, 0, head, SinkOf(layer));
      return;
    }
    // INT2 pages are switched off, and the engine has no place for others.
    Page quantized;
    quantized.position = page.position;
    quantized.tile_bytes = static_cast<size_t>(geometry_.tile_bytes);
    quantized.tiles = TileOf(page, layer, 0, blocks);
    backend_.StoreTile(rows.window(), layer, head, quantized);
  }

  uint32_t StoreTile(std::span<const int64_t> blocks, int layer, int head,
                     const Page& page) const override {
    if (page.position == 0) {
      PageRows rows(rows_.head_dim);
      rows_.Read(SinkOf(layer), blocks, 0, head, rows);
      return backend_.StoreTile(rows.window(), layer, head, page);
    }
    std::byte* const tile = page.layer(layer) + page.tile_bytes * head;
    std::memcpy(tile, TileOf(page, layer, head, blocks), page.tile_bytes);
    return kernels::HasRowWithoutScale(options_.tile_shape(),
                                       reinterpret_cast<const uint8_t*>(tile))
               ? kernels::kStatusNonFinite
               : 0;
  }

 private:
  std::byte* TileOf(const Page& page, int layer, int head, std::span<const int64_t> blocks) const {
    const BlockPool& pool = cache_.layers[layer];
    return pool.history + pool.block_stride * blocks[geometry_.sink_blocks + page.position] +
           int64_t{geometry_.tile_bytes} * head;
  }
  PagedCache::Layer SinkOf(int layer) const {
    const BlockPool& pool = cache_.layers[layer];
    PagedRows k{.base = pool.sink,
                .block_stride = pool.block_stride / static_cast<int64_t>(sizeof(Bf16)),
                .head_stride = geometry_.tile_bytes / static_cast<int64_t>(sizeof(Bf16)),
                .token_stride = int64_t{2} * rows_.head_dim};
    PagedRows v = k;
    v.base = pool.sink + sizeof(Bf16) * rows_.head_dim;
    return {.k = k, .v = v};
  }

  const BlockCache cache_;
  const WorkerOptions& options_;
  const BlockGeometry geometry_;
  const RowBlocks rows_;
  const CpuBackend& backend_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const HostCache>> NewPagedHostCache(PagedCache cache,
                                                                   const WorkerOptions& options,
                                                                   const CpuBackend& backend) {
  CRUMB_RETURN_IF_ERROR(CheckCache(cache, options.own_layers()));
  return std::make_shared<const PagedHostCache>(std::move(cache), options, backend);
}

absl::StatusOr<std::shared_ptr<const HostCache>> NewBlockHostCache(BlockCache cache,
                                                                   const WorkerOptions& options,
                                                                   const CpuBackend& backend) {
  CRUMB_RETURN_IF_ERROR(CheckBlockOptions(options));
  if (static_cast<int>(cache.layers.size()) != options.own_layers()) {
    return absl::InvalidArgumentError(fmt::format("the pool has {} layers, this rank {}",
                                                  cache.layers.size(), options.own_layers()));
  }
  const int64_t bytes = int64_t{BlockGeometryOf(options).tile_bytes} * options.own_kv_heads();
  for (const BlockPool& pool : cache.layers) {
    if (pool.history == nullptr || pool.sink == nullptr || pool.block_stride < bytes ||
        pool.block_stride % alignof(Bf16) != 0 || pool.blocks <= 0 ||
        pool.blocks != cache.layers[0].blocks) {
      return absl::InvalidArgumentError(fmt::format(
          "each layer of the pool has memory for history and sink, as many blocks as the others, "
          "and an even block_stride of at least {} bytes",
          bytes));
    }
  }
  return std::make_shared<const BlockHostCache>(std::move(cache), options, backend);
}

}  // namespace crumb::client
