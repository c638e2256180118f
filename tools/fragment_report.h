// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/tile.h"
#include "kernels/tile_codec.h"
#include "nlohmann/json_fwd.hpp"
#include "tools/fragment_file.h"

// The findings of `crumb page inspect`.
namespace crumb::tools {

// The least, mean and greatest of the finite values; all 0 if there were none.
struct Spread {
  float least = 0;
  double mean = 0;
  float greatest = 0;
};

// K or V of one INT2 tile.
struct Int2PartStatistics {
  Spread scale;
  Spread minimum;
  std::array<uint64_t, 4> codes{};  // how often each code occurs
  uint64_t non_finite = 0;          // scales and minima that are not finite
};

// K or V of one BF16 tile.
struct Bf16PartStatistics {
  Spread value;
  uint64_t non_finite = 0;
};

struct TileReport {
  int layer = 0;
  int head = 0;
  uint32_t sum_expected = 0;               // checksum in the header
  uint32_t sum_found = 0;                  // CRC-32C of the bytes
  std::array<Int2PartStatistics, 2> int2;  // K, V; set for INT2 fragments of a known shape
  std::array<Bf16PartStatistics, 2> bf16;  // K, V; set for BF16 fragments of a known shape

  bool intact() const { return sum_expected == sum_found; }
};

struct FragmentReport {
  FragmentHeader header;
  // The shape that follows from tile size and format; empty if no shape has that size or the layout
  // is unknown.
  std::optional<kernels::TileShape> shape;
  std::vector<TileReport> tiles;  // layer by layer, head by head
  int damaged_tiles = 0;
};

// The codes of one row of an INT2 tile in one group of channels.
struct TileRow {
  kernels::TilePart part = kernels::TilePart::kKey;
  int token = 0;
  int group = 0;
  float scale = 0;
  float minimum = 0;
  std::vector<uint8_t> codes;  // [group_size] in channel order
};

// Returns the shape of the fragment's tiles, if the kernels support it.
std::optional<kernels::TileShape> ShapeOf(const FragmentHeader& header);

// Computes the checksum of every tile, and its statistics if the shape is known. A damaged tile is
// no error: it is counted, and its statistics are those of the bytes as they are.
FragmentReport InspectFragment(const FragmentFile& file);

// Returns the rows of one INT2 tile: K's tokens, then V's. kInvalidArgument: the fragment does not
// have the tile, is not INT2, or has an unknown shape.
absl::StatusOr<std::vector<TileRow>> RowsOfTile(const FragmentFile& file, int layer, int head);

// The report as text and as JSON. JSON has head_dim and group_size null, and no statistics, if the
// shape is unknown.
std::string FragmentText(const FragmentReport& report);
nlohmann::json FragmentJson(const FragmentReport& report);

std::string TileRowsText(std::span<const TileRow> rows);
nlohmann::json TileRowsJson(std::span<const TileRow> rows);

}  // namespace crumb::tools
