// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/coverage.h"

namespace crumb::storage {
namespace {

void AddUnlessEmpty(const TileRange& piece, std::vector<TileRange>& pieces) {
  if (piece.layers.begin < piece.layers.end && piece.heads.begin < piece.heads.end) {
    pieces.push_back(piece);
  }
}

// Adds what is left of `piece` without `hole`: the layers before and after it whole, and in its
// layers the heads before and after it.
void SubtractOne(const TileRange& piece, const TileRange& hole, std::vector<TileRange>& left) {
  const TileRange cut = Intersect(piece, hole);
  if (cut.tiles() == 0) {
    left.push_back(piece);
    return;
  }
  AddUnlessEmpty({{piece.layers.begin, cut.layers.begin}, piece.heads}, left);
  AddUnlessEmpty({cut.layers, {piece.heads.begin, cut.heads.begin}}, left);
  AddUnlessEmpty({cut.layers, {cut.heads.end, piece.heads.end}}, left);
  AddUnlessEmpty({{cut.layers.end, piece.layers.end}, piece.heads}, left);
}

}  // namespace

bool Covers(std::span<const TileRange> parts, const TileRange& whole) {
  int tiles = 0;
  for (const TileRange& part : parts) tiles += Intersect(part, whole).tiles();
  return tiles == whole.tiles();
}

std::vector<TileRange> Subtract(const TileRange& whole, std::span<const TileRange> parts) {
  std::vector<TileRange> pieces = {whole};
  for (const TileRange& part : parts) {
    std::vector<TileRange> left;
    for (const TileRange& piece : pieces) SubtractOne(piece, part, left);
    pieces = std::move(left);
  }
  return pieces;
}

}  // namespace crumb::storage
