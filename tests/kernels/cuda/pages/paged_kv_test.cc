// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {
namespace {

struct PagedOptions {
  TileShape tile;
  int layers = 2;
  int kv_heads = 3;
  int block_tokens = 16;
  KvLayout layout = KvLayout::kNhd;
  KvPlacement placement = KvPlacement::kApart;
  KvElement element = KvElement::kBf16;
  bool rotate_k = false;
  bool rotate_v = false;
  bool centred = false;
  double value_std = 1.0;
  uint32_t seed = 1;
};

// Pages of two sequences and an engine's paged KV, on host and device. One page begins inside an
// engine's block, and one of the sequence's blocks is absent.
class PagedCase {
 public:
  static constexpr int kSequences = 2, kTokensMax = 400, kPositionBlocks = 3;

  explicit PagedCase(const PagedOptions& options) : o_(options), random_(options.seed) {
    kv_.element = o_.element;
    kv_.block_tokens = o_.block_tokens;
    kv_.SetStrides(o_.layout, o_.placement, o_.kv_heads, o_.tile.head_dim);
    kv_.blocks_max = (kTokensMax + o_.block_tokens - 1) / o_.block_tokens;
    MakeTable();
    MakePages();
    MakeTransforms();
  }

  // Returns the byte offset of a token's row in one layer's K memory, or a negative number if the
  // token is absent.
  int64_t RowOffset(int sequence, int token, int head) const {
    const int block = table_[sequence * kv_.blocks_max + token / o_.block_tokens];
    if (block < 0) return -1;
    return block * kv_.block_stride + token % o_.block_tokens * kv_.token_stride +
           head * kv_.head_stride;
  }

  void Dequantize(int pages_max) {
    cache_.Allocate(cache_bytes());
    UploadAddresses();
    DequantizeParams p;
    p.tile = o_.tile;
    p.layers = o_.layers;
    p.kv_heads = o_.kv_heads;
    p.pages_max = pages_max;
    p.pages = count_.as<int32_t>();
    p.page_address = page_address_.as<uint64_t>();
    p.tile_head_stride = static_cast<int64_t>(o_.tile.int2_bytes());
    p.tile_layer_stride = p.tile_head_stride * o_.kv_heads;
    p.tokens = {sequence_.as<int32_t>(), first_token_.as<int32_t>()};
    p.kv = kv_;
    if (o_.rotate_k) p.k.rotation = device_rotation_[0].as<float>();
    if (o_.rotate_v) p.v.rotation = device_rotation_[1].as<float>();
    if (o_.centred) {
      p.k.mean = device_mean_[0].as<float>();
      p.v.mean = device_mean_[1].as<float>();
      p.position_block = position_block_.as<int32_t>();
      p.position_blocks = kPositionBlocks;
    }
    ASSERT_CUDA(DequantizePages(p, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
  }

  // Compares every byte of the cache: rows of pages with the definition, all others with the
  // poison.
  void ExpectRows() {
    const int dim = o_.tile.head_dim;
    std::vector<uint8_t> cache = cache_.Download<uint8_t>();
    double worst = 0.0;
    size_t inexact = 0;
    for (size_t page = 0; page < pages_.size(); ++page) {
      for (int layer = 0; layer < o_.layers; ++layer) {
        for (int head = 0; head < o_.kv_heads; ++head) {
          for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
            for (int t = 0; t < 64; ++t) {
              const int64_t at = RowOffset(pages_[page].sequence, pages_[page].first + t, head);
              if (at < 0) continue;
              const bool value = part == TilePart::kValue;
              Bf16* row = reinterpret_cast<Bf16*>(cache.data() + LayerOffset(layer, value) + at);
              const std::vector<double> expected = Row(page, layer, head, part, t);
              double error = 0.0, norm = 1e-30;
              for (int i = 0; i < dim; ++i) {
                const double difference = Bf16ToFloat(row[i]) - expected[i];
                error += difference * difference;
                norm += expected[i] * expected[i];
                if (!(value ? o_.rotate_v : o_.rotate_k)) {
                  inexact += row[i].bits != Bf16FromFloat(static_cast<float>(expected[i])).bits;
                }
                row[i] = {0xffff};
              }
              error = std::sqrt(error / norm);
              if ((value ? o_.rotate_v : o_.rotate_k) && !(error <= worst)) worst = error;
            }
          }
        }
      }
    }
    EXPECT_EQ(inexact, 0u) << "rows that need no rotation are exact";
    // Rounding to bf16 alone has an error of about 1.7e-3, or more if few channels share their
    // leading digits.
    EXPECT_LE(worst, 2.6e-3);
    worst_ = worst;
    size_t touched = 0;
    for (const uint8_t byte : cache) touched += byte != 0xff;
    EXPECT_EQ(touched, 0u) << "bytes outside the rows";
  }

  // Quantizes the cache's pages on host and device. The method is naive, so the bytes are equal.
  // `poisoned`: an element of the first page's last layer and head is NaN.
  void QuantizeAndCompare(bool poisoned = false) {
    const int dim = o_.tile.head_dim, element = o_.element == KvElement::kBf16 ? 2 : 1;
    std::vector<uint8_t> cache(cache_bytes());
    for (size_t i = 0; i + 1 < cache.size(); i += 2) {
      if (element == 2) {
        const Bf16 x = RandomRows(1, 1.0, random_)[0];
        std::memcpy(cache.data() + i, &x, 2);
      } else {
        for (int j = 0; j < 2; ++j) {
          uint8_t byte = static_cast<uint8_t>(random_());
          if ((byte & 0x7f) == 0x7f) byte ^= 1;  // NaN
          cache[i + j] = byte;
        }
      }
    }
    if (poisoned) {
      const size_t row = LayerOffset(o_.layers - 1, false) +
                         RowOffset(pages_[0].sequence, pages_[0].first + 40, o_.kv_heads - 1);
      for (int i = 0; i < element; ++i) cache[row + 9 * element + i] = 0xff;
    }
    cache_.Upload(cache);
    UploadAddresses();
    tiles_.Fill(0xff);
    const std::vector<float> scales = {0.5f, 0.013f};
    DeviceBuffer k_scale(scales), v_scale(scales);
    DeviceBuffer status(std::vector<uint32_t>(pages_.size(), 0));
    QuantizeFromParams p;
    p.evict.tile = o_.tile;
    p.evict.layers = o_.layers;
    p.evict.kv_heads = o_.kv_heads;
    p.evict.windows_max = static_cast<int>(pages_.size()) + 2;
    p.evict.windows = count_.as<int32_t>();
    p.evict.tile_address = page_address_.as<uint64_t>();
    p.evict.tile_head_stride = static_cast<int64_t>(o_.tile.int2_bytes());
    p.evict.tile_layer_stride = p.evict.tile_head_stride * o_.kv_heads;
    p.evict.status = status.as<uint32_t>();
    p.tokens = {sequence_.as<int32_t>(), first_token_.as<int32_t>()};
    p.kv = kv_;
    p.k_scale = k_scale.as<float>();
    p.v_scale = v_scale.as<float>();
    DeviceBuffer workspace(QuantizeFromWorkspaceBytes(p.evict));
    p.workspace = workspace.as<void>();
    ASSERT_CUDA(QuantizeFromPages(p, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint8_t> tiles = tiles_.Download<uint8_t>();
    size_t different = 0;
    std::vector<uint32_t> expected_status(pages_.size(), 0);
    for (size_t page = 0; page < pages_.size(); ++page) {
      for (int layer = 0; layer < o_.layers; ++layer) {
        for (int head = 0; head < o_.kv_heads; ++head) {
          std::vector<Bf16> rows[2];
          for (const bool value : {false, true}) {
            for (int t = 0; t < 64; ++t) {
              const int64_t at = RowOffset(pages_[page].sequence, pages_[page].first + t, head);
              for (int i = 0; i < dim; ++i) {
                rows[value ? 1 : 0].push_back(
                    at < 0
                        ? Bf16{0}
                        : Element(cache.data() + LayerOffset(layer, value) + at, i, scales[layer]));
              }
            }
          }
          alignas(128) uint8_t tile[16384];
          QuantizeParams q;
          q.shape = o_.tile;
          q.k = rows[0].data();
          q.v = rows[1].data();
          q.k_stride = q.v_stride = dim;
          q.tile = tile;
          expected_status[page] |= QuantizeTile(q);
          const uint8_t* got = tiles.data() + TileOffset(page, layer, head);
          for (size_t i = 0; i < o_.tile.int2_bytes(); ++i) different += got[i] != tile[i];
        }
      }
    }
    EXPECT_EQ(different, 0u);
    EXPECT_EQ(status.Download<uint32_t>(), expected_status);
    EXPECT_EQ(expected_status[0], poisoned ? kStatusNonFinite : 0u);
  }

  std::vector<uint8_t> CacheBytes() const { return cache_.Download<uint8_t>(); }
  int pages() const { return static_cast<int>(pages_.size()); }
  double worst() const { return worst_; }

 private:
  struct Page {
    int sequence, first;
  };

  void MakeTable() {
    std::vector<int32_t> blocks(2 * kSequences * kv_.blocks_max);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random_);
    blocks_ = static_cast<int>(blocks.size());
    table_.assign(blocks.begin(), blocks.begin() + kSequences * kv_.blocks_max);
    table_[kv_.blocks_max + 70 / o_.block_tokens] = -1;
    device_table_.Upload(table_);
    kv_.block_table = device_table_.as<int32_t>();
  }

  void MakePages() {
    pages_ = {{0, 64}, {1, 64}, {0, 128}, {1, 257}, {0, 0}};
    std::vector<int32_t> sequence, first, block;
    tiles_host_.resize(pages_.size() * o_.layers * o_.kv_heads * o_.tile.int2_bytes());
    for (size_t i = 0; i < tiles_host_.size(); i += o_.tile.int2_bytes()) {
      RandomTile(o_.tile, o_.value_std, o_.value_std, random_, tiles_host_.data() + i);
    }
    tiles_.Upload(tiles_host_);
    std::vector<uint64_t> address;
    for (size_t i = 0; i < pages_.size(); ++i) {
      sequence.push_back(pages_[i].sequence);
      first.push_back(pages_[i].first);
      block.push_back(static_cast<int>(i % kPositionBlocks));
      address.push_back(tiles_.address() + TileOffset(i, 0, 0));
    }
    sequence_.Upload(sequence);
    first_token_.Upload(first);
    position_block_.Upload(block);
    page_address_.Upload(address);
    count_.Upload(std::vector<int32_t>{static_cast<int>(pages_.size())});
  }

  void MakeTransforms() {
    const size_t matrices = static_cast<size_t>(o_.layers) * o_.kv_heads;
    for (int part = 0; part < 2; ++part) {
      for (size_t i = 0; i < matrices; ++i) {
        const std::vector<float> one = RandomRotation(o_.tile.head_dim, random_);
        rotation_[part].insert(rotation_[part].end(), one.begin(), one.end());
      }
      mean_[part] =
          RandomFloats(matrices * kPositionBlocks * o_.tile.head_dim, 0.5 * o_.value_std, random_);
      device_rotation_[part].Upload(rotation_[part]);
      device_mean_[part].Upload(mean_[part]);
    }
  }

  // Layers follow each other. With V apart, the V of a layer lies behind its K.
  size_t PartBytes() const { return static_cast<size_t>(kv_.block_stride) * blocks_ + 256; }
  size_t cache_bytes() const {
    return o_.layers * PartBytes() * (o_.placement == KvPlacement::kApart ? 2 : 1);
  }
  size_t LayerOffset(int layer, bool value) const {
    if (o_.placement == KvPlacement::kApart) return (2 * layer + (value ? 1 : 0)) * PartBytes();
    return layer * PartBytes() + (value ? static_cast<size_t>(kv_.block_stride) / 2 : 0);
  }
  void UploadAddresses() {
    std::vector<uint64_t> address[2];
    for (int layer = 0; layer < o_.layers; ++layer) {
      for (const bool value : {false, true}) {
        address[value ? 1 : 0].push_back(cache_.address() + LayerOffset(layer, value));
      }
    }
    k_address_.Upload(address[0]);
    v_address_.Upload(address[1]);
    kv_.k_address = k_address_.as<uint64_t>();
    kv_.v_address = v_address_.as<uint64_t>();
  }
  size_t TileOffset(size_t page, int layer, int head) const {
    return ((page * o_.layers + layer) * o_.kv_heads + head) * o_.tile.int2_bytes();
  }

  std::vector<double> Row(size_t page, int layer, int head, TilePart part, int t) const {
    const int dim = o_.tile.head_dim;
    const uint8_t* tile = tiles_host_.data() + TileOffset(page, layer, head);
    std::vector<float> k(64 * dim), v(64 * dim);
    const bool value = part == TilePart::kValue;
    DequantizeTile(o_.tile, tile, value ? nullptr : k.data(), value ? v.data() : nullptr);
    const float* y = (value ? v : k).data() + t * dim;
    std::vector<double> row(y, y + dim);
    const size_t matrix = static_cast<size_t>(layer) * o_.kv_heads + head;
    if (value ? o_.rotate_v : o_.rotate_k) {
      const float* r = rotation_[value ? 1 : 0].data() + matrix * dim * dim;
      for (int i = 0; i < dim; ++i) {
        row[i] = 0.0;
        for (int j = 0; j < dim; ++j) row[i] += static_cast<double>(y[j]) * r[i * dim + j];
      }
    }
    if (o_.centred) {
      const float* mean =
          mean_[value ? 1 : 0].data() + (matrix * kPositionBlocks + page % kPositionBlocks) * dim;
      // The sum is in single precision, as in the kernel, so that rows can be compared exactly.
      for (int i = 0; i < dim; ++i) row[i] = static_cast<float>(row[i]) + mean[i];
    }
    return row;
  }

  // Returns the e4m3 value as the format defines it, times the scale, or the bf16 element.
  Bf16 Element(const uint8_t* row, int i, float scale) const {
    if (o_.element == KvElement::kBf16) {
      Bf16 x;
      std::memcpy(&x, row + 2 * i, 2);
      return x;
    }
    const int byte = row[i], exponent = byte >> 3 & 15, mantissa = byte & 7;
    if (exponent == 15 && mantissa == 7) {
      return Bf16FromFloat(std::numeric_limits<float>::quiet_NaN());
    }
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(8.0f + mantissa, exponent - 10);
    return Bf16FromFloat(((byte & 0x80) != 0 ? -magnitude : magnitude) * scale);
  }

  const PagedOptions o_;
  std::mt19937 random_;
  PagedKv kv_;
  int blocks_ = 0;
  double worst_ = 0.0;
  std::vector<int32_t> table_;
  std::vector<Page> pages_;
  std::vector<uint8_t> tiles_host_;
  std::vector<float> rotation_[2], mean_[2];
  DeviceBuffer cache_, device_table_, tiles_, page_address_, sequence_, first_token_,
      position_block_, count_, k_address_, v_address_, device_rotation_[2], device_mean_[2];
};

const TileShape kShapes[] = {{64, 128, 128}, {64, 128, 64},  {64, 128, 32}, {64, 64, 64},
                             {64, 64, 32},   {64, 256, 128}, {64, 256, 64}, {64, 256, 32}};

TEST(DequantizePages, EveryShapeAndTransform) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (int mask = 0; mask < 8; ++mask) {
      PagedOptions options;
      options.tile = shape;
      options.rotate_k = (mask & 1) != 0;
      options.rotate_v = (mask & 2) != 0;
      options.centred = (mask & 4) != 0;
      options.seed = mask;
      PagedCase run(options);
      run.Dequantize(run.pages() + mask);
      run.ExpectRows();
      if (mask == 7) {
        std::printf("d %d G %d: error %.2e\n", shape.head_dim, shape.group_size, run.worst());
      }
    }
  }
}

TEST(DequantizePages, EveryLayout) {
  CRUMB_NEEDS_DEVICE();
  for (const int block_tokens : {1, 8, 16, 48, 64, 100, 128}) {
    for (const KvLayout layout : {KvLayout::kNhd, KvLayout::kHnd}) {
      for (const KvPlacement placement : {KvPlacement::kApart, KvPlacement::kTogether}) {
        PagedOptions options;
        options.block_tokens = block_tokens;
        options.layout = layout;
        options.placement = placement;
        options.rotate_k = true;
        options.seed = block_tokens;
        PagedCase run(options);
        run.Dequantize(run.pages());
        run.ExpectRows();
      }
    }
  }
}

TEST(DequantizePages, LargeAndSmallValues) {
  CRUMB_NEEDS_DEVICE();
  for (const double value_std : {1e-4, 2e4}) {
    PagedOptions options;
    options.value_std = value_std;
    options.rotate_k = options.rotate_v = true;
    PagedCase run(options);
    run.Dequantize(run.pages());
    run.ExpectRows();
  }
}

TEST(DequantizePages, SameBytesOnEveryRunAndGrid) {
  CRUMB_NEEDS_DEVICE();
  PagedOptions options;
  options.rotate_k = options.rotate_v = options.centred = true;
  PagedCase run(options);
  run.Dequantize(run.pages());
  const std::vector<uint8_t> first = run.CacheBytes();
  run.Dequantize(run.pages() + 500);
  EXPECT_EQ(run.CacheBytes(), first);
}

TEST(QuantizeFromPages, SameBytesAsTheCpu) {
  CRUMB_NEEDS_DEVICE();
  for (const KvElement element : {KvElement::kBf16, KvElement::kFp8E4m3}) {
    for (const int block_tokens : {1, 16, 48, 128}) {
      for (const KvLayout layout : {KvLayout::kNhd, KvLayout::kHnd}) {
        PagedOptions options;
        options.tile = block_tokens == 16   ? TileShape{64, 64, 32}
                       : block_tokens == 48 ? TileShape{64, 256, 64}
                                            : TileShape{64, 128, 128};
        options.element = element;
        options.block_tokens = block_tokens;
        options.layout = layout;
        options.placement = block_tokens == 48 ? KvPlacement::kTogether : KvPlacement::kApart;
        PagedCase(options).QuantizeAndCompare();
      }
    }
  }
}

TEST(QuantizeFromPages, SaysWhichPageIsNotFinite) {
  CRUMB_NEEDS_DEVICE();
  for (const KvElement element : {KvElement::kBf16, KvElement::kFp8E4m3}) {
    PagedOptions options;
    options.element = element;
    PagedCase(options).QuantizeAndCompare(/*poisoned=*/true);
  }
}

TEST(PagedKv, RefusesSizesItDoesNotServe) {
  DequantizeParams p;
  p.kv.block_tokens = 129;
  EXPECT_EQ(DequantizePages(p, nullptr), cudaErrorInvalidValue);
  p.kv.block_tokens = 16;
  p.tile.tokens = 32;
  EXPECT_EQ(DequantizePages(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
