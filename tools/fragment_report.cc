// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/fragment_report.h"

#include <cmath>
#include <numeric>
#include <span>
#include <string>

#include "common/crc32c.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "nlohmann/json.hpp"
#include "tools/text_table.h"

namespace crumb::tools {
namespace {

using kernels::TilePart;
using kernels::TileShape;

constexpr TilePart kParts[] = {TilePart::kKey, TilePart::kValue};

class SpreadSum {
 public:
  // Returns false for a value that is not finite.
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

namespace {

using nlohmann::json;

constexpr const char* kPartNames[] = {"k", "v"};

const char* FormatName(PageFormat format) { return format == PageFormat::kInt2 ? "int2" : "bf16"; }

std::string RangeText(IndexRange range) { return fmt::format("[{}, {})", range.begin, range.end); }

std::string SpreadText(const Spread& spread) {
  return fmt::format("{:.4g} .. {:.4g} .. {:.4g}", spread.least, spread.mean, spread.greatest);
}

// Returns the fractions of the codes 0 to 3 in per cent.
std::string CodesText(const std::array<uint64_t, 4>& codes) {
  const double all = static_cast<double>(std::accumulate(codes.begin(), codes.end(), uint64_t{0}));
  return fmt::format("{:.1f}/{:.1f}/{:.1f}/{:.1f}", 100 * codes[0] / all, 100 * codes[1] / all,
                     100 * codes[2] / all, 100 * codes[3] / all);
}

std::string ShapeText(const FragmentReport& report) {
  if (!report.shape) return "not known here: no statistics";
  const std::string head_dim = fmt::format("head_dim {}", report.shape->head_dim);
  if (report.header.format == PageFormat::kBf16) return head_dim;
  return fmt::format("{}, group {}", head_dim, report.shape->group_size);
}

std::string HeaderText(const FragmentReport& report) {
  const FragmentHeader& header = report.header;
  TextTable table({"field", "value"});
  table.AddRow({"format", FormatName(header.format)});
  table.AddRow({"layout", fmt::format("id {}", header.layout_id)});
  table.AddRow({"keyspace", header.keyspace.ToHex()});
  table.AddRow({"generation", fmt::format("{}", header.generation)});
  table.AddRow({"key", header.key.ToHex()});
  table.AddRow({"parent", header.parent.ToHex()});
  table.AddRow({"layers", RangeText(header.range.layers)});
  table.AddRow({"KV heads", RangeText(header.range.heads)});
  table.AddRow({"tokens", fmt::format("{}", header.page_tokens)});
  table.AddRow({"over INT2 prefix", header.over_int2_prefix ? "yes" : "no"});
  table.AddRow({"tiles", fmt::format("{} of {} B, {} damaged", report.tiles.size(),
                                     header.tile_bytes, report.damaged_tiles)});
  table.AddRow({"tile shape", ShapeText(report)});
  return table.ToString();
}

std::string TilesText(const FragmentReport& report) {
  const bool int2 = report.header.format == PageFormat::kInt2;
  TextTable table(int2 ? std::vector<std::string>{"layer", "head", "sum", "part",
                                                  "scale least .. mean .. greatest",
                                                  "minimum least .. mean .. greatest",
                                                  "codes 0/1/2/3 %", "non-finite"}
                       : std::vector<std::string>{"layer", "head", "sum", "part",
                                                  "value least .. mean .. greatest", "non-finite"});
  for (const TileReport& tile : report.tiles) {
    for (size_t part = 0; part < std::size(kPartNames); ++part) {
      std::vector<std::string> cells = {fmt::format("{}", tile.layer), fmt::format("{}", tile.head),
                                        tile.intact() ? "ok" : "DAMAGED", kPartNames[part]};
      if (report.shape && int2) {
        const Int2PartStatistics& s = tile.int2[part];
        cells.insert(cells.end(), {SpreadText(s.scale), SpreadText(s.minimum), CodesText(s.codes),
                                   fmt::format("{}", s.non_finite)});
      } else if (report.shape) {
        const Bf16PartStatistics& s = tile.bf16[part];
        cells.insert(cells.end(), {SpreadText(s.value), fmt::format("{}", s.non_finite)});
      }
      table.AddRow(std::move(cells));
    }
  }
  return table.ToString();
}

json SpreadJson(const Spread& spread) {
  return {{"min", spread.least}, {"mean", spread.mean}, {"max", spread.greatest}};
}

json TileJson(const FragmentReport& report, const TileReport& tile) {
  json out = {{"layer", tile.layer},
              {"head", tile.head},
              {"intact", tile.intact()},
              {"sum_expected", tile.sum_expected},
              {"sum_found", tile.sum_found}};
  for (size_t part = 0; report.shape && part < std::size(kPartNames); ++part) {
    if (report.header.format == PageFormat::kInt2) {
      const Int2PartStatistics& s = tile.int2[part];
      out[kPartNames[part]] = {{"scale", SpreadJson(s.scale)},
                               {"minimum", SpreadJson(s.minimum)},
                               {"codes", s.codes},
                               {"non_finite", s.non_finite}};
    } else {
      const Bf16PartStatistics& s = tile.bf16[part];
      out[kPartNames[part]] = {{"value", SpreadJson(s.value)}, {"non_finite", s.non_finite}};
    }
  }
  return out;
}

}  // namespace

std::string FragmentText(const FragmentReport& report) {
  return HeaderText(report) + "\n" + TilesText(report);
}

json FragmentJson(const FragmentReport& report) {
  const FragmentHeader& header = report.header;
  json out = {{"format", FormatName(header.format)},
              {"layout_id", header.layout_id},
              {"keyspace", header.keyspace.ToHex()},
              {"generation", header.generation},
              {"key", header.key.ToHex()},
              {"parent", header.parent.ToHex()},
              {"layers", {header.range.layers.begin, header.range.layers.end}},
              {"kv_heads", {header.range.heads.begin, header.range.heads.end}},
              {"page_tokens", header.page_tokens},
              {"over_int2_prefix", header.over_int2_prefix},
              {"tile_bytes", header.tile_bytes},
              {"damaged_tiles", report.damaged_tiles},
              {"head_dim", nullptr},
              {"group_size", nullptr},
              {"rows", json::array()}};
  if (report.shape) {
    out["head_dim"] = report.shape->head_dim;
    if (header.format == PageFormat::kInt2) out["group_size"] = report.shape->group_size;
  }
  for (const TileReport& tile : report.tiles) out["rows"].push_back(TileJson(report, tile));
  return out;
}

std::string TileRowsText(std::span<const TileRow> rows) {
  TextTable table({"part", "token", "group", "scale", "minimum", "codes in channel order"});
  for (const TileRow& row : rows) {
    // The bar keeps the column of digits left-aligned.
    std::string codes = "|";
    for (const uint8_t code : row.codes) codes += static_cast<char>('0' + code);
    table.AddRow({kPartNames[static_cast<size_t>(row.part)], fmt::format("{}", row.token),
                  fmt::format("{}", row.group), fmt::format("{:.5g}", row.scale),
                  fmt::format("{:.5g}", row.minimum), codes + "|"});
  }
  return table.ToString();
}

json TileRowsJson(std::span<const TileRow> rows) {
  json out = {{"rows", json::array()}};
  for (const TileRow& row : rows) {
    out["rows"].push_back({{"part", kPartNames[static_cast<size_t>(row.part)]},
                           {"token", row.token},
                           {"group", row.group},
                           {"scale", row.scale},
                           {"minimum", row.minimum},
                           {"codes", row.codes}});
  }
  return out;
}

}  // namespace crumb::tools
