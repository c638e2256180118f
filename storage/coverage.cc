// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/coverage.h"

#include <algorithm>

namespace crumb::storage {
namespace {

void AddUnlessEmpty(const TileRange& piece, std::vector<TileRange>& pieces) {
  if (piece.layers.begin < piece.layers.end && piece.heads.begin < piece.heads.end) {
    pieces.push_back(piece);
  }
}

// Adds the difference of `piece` and `hole` to `left`: all heads of the layers before and after the
// hole, and in the hole's layers the heads before and after it.
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

TileSet::TileSet(const TileRange& whole)
    : whole_(whole),
      words_per_row_((static_cast<size_t>(std::max(0, whole.heads.size())) + 63) / 64) {}

template <typename Visit>
bool TileSet::ForEachWord(const TileRange& part, Visit visit) const {
  const TileRange cut = Intersect(part, whole_);
  if (cut.tiles() <= 0) return true;
  const auto first = static_cast<size_t>(cut.heads.begin - whole_.heads.begin);
  const auto end = static_cast<size_t>(cut.heads.end - whole_.heads.begin);
  for (int layer = cut.layers.begin; layer < cut.layers.end; ++layer) {
    const size_t row = static_cast<size_t>(layer - whole_.layers.begin) * words_per_row_;
    for (size_t word = first / 64; word * 64 < end; ++word) {
      uint64_t mask = ~uint64_t{0};
      if (word * 64 < first) mask &= ~uint64_t{0} << (first - word * 64);
      if (end - word * 64 < 64) mask &= (uint64_t{1} << (end - word * 64)) - 1;
      if (!visit(row + word, mask)) return false;
    }
  }
  return true;
}

bool TileSet::Overlaps(const TileRange& part) const {
  if (tiles_ == 0) return false;
  return !ForEachWord(part, [&](size_t word, uint64_t mask) { return (bits_[word] & mask) == 0; });
}

void TileSet::Add(const TileRange& part) {
  if (bits_.empty()) bits_.resize(Rows(whole_));
  ForEachWord(part, [&](size_t word, uint64_t mask) {
    bits_[word] |= mask;
    return true;
  });
  tiles_ += std::max(0, Intersect(part, whole_).tiles());
}

void TileSet::Clear() {
  std::fill(bits_.begin(), bits_.end(), 0);
  tiles_ = 0;
}

size_t TileSet::Rows(const TileRange& part) const {
  const TileRange cut = Intersect(part, whole_);
  return cut.tiles() <= 0 ? 0 : static_cast<size_t>(cut.layers.size()) * words_per_row_;
}

}  // namespace crumb::storage
