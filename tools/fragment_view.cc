// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/fragment_view.h"

#include <numeric>

#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "tools/text_table.h"

namespace crumb::tools {
namespace {

using nlohmann::json;

constexpr const char* kPartNames[] = {"k", "v"};

const char* FormatName(PageFormat format) { return format == PageFormat::kInt2 ? "int2" : "bf16"; }

std::string RangeText(IndexRange range) { return fmt::format("[{}, {})", range.begin, range.end); }

std::string SpreadText(const Spread& spread) {
  return fmt::format("{:.4g} .. {:.4g} .. {:.4g}", spread.least, spread.mean, spread.greatest);
}

// Shares of the codes 0 to 3 in per cent.
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
    // The bar keeps the column of digits left-aligned and easy to cut out.
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
