// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/fragment_report.h"

#include <cmath>
#include <span>
#include <string>

#include "common/crc32c.h"
#include "common/status_macros.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"

namespace crumb::tools {
namespace {

using kernels::TilePart;
using kernels::TileShape;

constexpr TilePart kParts[] = {TilePart::kKey, TilePart::kValue};

class SpreadSum {
 public:
  // Returns false for a value that is no number.
  bool Add(float value) {
    if (!std::isfinite(value)) return false;
    if (count_ == 0 || value < spread_.least) spread_.least = value;
    if (count_ == 0 || value > spread_.greatest) spread_.greatest = value;
    sum_ += value;
    ++count_;
    return true;
  }
  Spread Total() const {
    Spread total = spread_;
    total.mean = count_ == 0 ? 0 : sum_ / static_cast<double>(count_);
    return total;
  }

 private:
  Spread spread_;
  double sum_ = 0;
  uint64_t count_ = 0;
};

Int2PartStatistics Int2StatisticsOf(const TileShape& shape, const uint8_t* tile, TilePart part) {
  Int2PartStatistics statistics;
  SpreadSum scales, minima;
  for (int token = 0; token < shape.tokens; ++token) {
    for (int group = 0; group < shape.groups(); ++group) {
      const kernels::RowMeta meta = kernels::ReadMeta(shape, tile, part, token, group);
      if (!scales.Add(kernels::Fp16ToFloat(meta.scale))) ++statistics.non_finite;
      if (!minima.Add(kernels::Fp16ToFloat(meta.minimum))) ++statistics.non_finite;
    }
    for (int channel = 0; channel < shape.head_dim; ++channel) {
      ++statistics.codes[kernels::ReadCode(shape, tile, part, token, channel)];
    }
  }
  statistics.scale = scales.Total();
  statistics.minimum = minima.Total();
  return statistics;
}

Bf16PartStatistics Bf16StatisticsOf(const TileShape& shape, const uint8_t* tile, TilePart part) {
  Bf16PartStatistics statistics;
  SpreadSum values;
  const size_t elements = static_cast<size_t>(shape.tokens) * shape.head_dim;
  const uint8_t* from = tile + (part == TilePart::kKey ? 0 : 2 * elements);
  for (size_t i = 0; i < elements; ++i) {
    const auto bits = static_cast<uint16_t>(from[2 * i] | from[2 * i + 1] << 8);
    if (!values.Add(kernels::Bf16ToFloat({bits}))) ++statistics.non_finite;
  }
  statistics.value = values.Total();
  return statistics;
}

std::span<const std::byte> TileBytes(const FragmentFile& file, size_t index) {
  const size_t size = file.header.tile_bytes;
  return std::span(file.tiles).subspan(index * size, size);
}

}  // namespace

std::optional<TileShape> ShapeOf(const FragmentHeader& header) {
  const bool int2 = header.format == PageFormat::kInt2;
  if (int2 && header.layout_id != kernels::kTileLayoutId) return std::nullopt;
  for (const int head_dim : {64, 128, 256}) {
    for (const int group_size : {128, 64, 32}) {
      const TileShape shape{header.page_tokens, head_dim, group_size};
      if (shape.Valid() && header.tile_bytes == (int2 ? shape.int2_bytes() : shape.bf16_bytes())) {
        return shape;
      }
    }
  }
  return std::nullopt;
}

FragmentReport InspectFragment(const FragmentFile& file) {
  FragmentReport report;
  report.header = file.header;
  report.shape = ShapeOf(file.header);
  const int heads = file.header.range.heads.size();
  for (size_t i = 0; i < file.header.tile_sums.size(); ++i) {
    const std::span<const std::byte> bytes = TileBytes(file, i);
    TileReport tile;
    tile.layer = file.header.range.layers.begin + static_cast<int>(i) / heads;
    tile.head = file.header.range.heads.begin + static_cast<int>(i) % heads;
    tile.sum_expected = file.header.tile_sums[i];
    tile.sum_found = Crc32c(bytes);
    if (!tile.intact()) ++report.damaged_tiles;
    const auto* from = reinterpret_cast<const uint8_t*>(bytes.data());
    for (size_t part = 0; report.shape && part < std::size(kParts); ++part) {
      if (file.header.format == PageFormat::kInt2) {
        tile.int2[part] = Int2StatisticsOf(*report.shape, from, kParts[part]);
      } else {
        tile.bf16[part] = Bf16StatisticsOf(*report.shape, from, kParts[part]);
      }
    }
    report.tiles.push_back(tile);
  }
  return report;
}

absl::StatusOr<std::vector<TileRow>> RowsOfTile(const FragmentFile& file, int layer, int head) {
  const TileRange& range = file.header.range;
  if (layer < range.layers.begin || layer >= range.layers.end || head < range.heads.begin ||
      head >= range.heads.end) {
    return absl::InvalidArgumentError("the fragment does not hold layer " + std::to_string(layer) +
                                      ", head " + std::to_string(head));
  }
  if (file.header.format != PageFormat::kInt2) {
    return absl::InvalidArgumentError("rows are shown for INT2 tiles; this fragment is BF16");
  }
  const std::optional<TileShape> shape = ShapeOf(file.header);
  if (!shape) return absl::InvalidArgumentError("the tiles have a size or layout not known here");
  const size_t index = static_cast<size_t>(layer - range.layers.begin) * range.heads.size() +
                       (head - range.heads.begin);
  const auto* tile = reinterpret_cast<const uint8_t*>(TileBytes(file, index).data());
  std::vector<TileRow> rows;
  for (const TilePart part : kParts) {
    for (int token = 0; token < shape->tokens; ++token) {
      for (int group = 0; group < shape->groups(); ++group) {
        const kernels::RowMeta meta = kernels::ReadMeta(*shape, tile, part, token, group);
        TileRow row{part,
                    token,
                    group,
                    kernels::Fp16ToFloat(meta.scale),
                    kernels::Fp16ToFloat(meta.minimum),
                    {}};
        for (int i = 0; i < shape->group_size; ++i) {
          row.codes.push_back(
              kernels::ReadCode(*shape, tile, part, token, group * shape->group_size + i));
        }
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

}  // namespace crumb::tools
