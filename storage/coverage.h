// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/fragment_header.h"

// The tiles of a page that are present, as rectangles of layers and heads.
namespace crumb::storage {

constexpr bool Overlaps(IndexRange a, IndexRange b) {
  return std::max(a.begin, b.begin) < std::min(a.end, b.end);
}
constexpr bool Overlaps(const TileRange& a, const TileRange& b) {
  return Overlaps(a.layers, b.layers) && Overlaps(a.heads, b.heads);
}

constexpr bool Contains(const TileRange& outer, const TileRange& inner) {
  return outer.layers.Contains(inner.layers) && outer.heads.Contains(inner.heads);
}

// Whether `parts`, of which no two overlap, hold every tile of `whole`.
bool Covers(std::span<const TileRange> parts, const TileRange& whole);

// The tiles of `whole` that no rectangle of `parts` holds, as rectangles that do not overlap.
std::vector<TileRange> Subtract(const TileRange& whole, std::span<const TileRange> parts);

// Tiles of one rectangle, a bit each: whether many rectangles overlap costs their rows, not their
// pairs.
class TileSet {
 public:
  explicit TileSet(const TileRange& whole);

  // Parts are looked at inside `whole` alone.
  bool Overlaps(const TileRange& part) const;
  // REQUIRES: none of its tiles is in the set.
  void Add(const TileRange& part);
  void Clear();
  // Whether all tiles of `whole` are in the set.
  bool full() const { return tiles_ == whole_.tiles(); }
  // Returns the number of words of 64 heads in the rows of `part`, which is the cost of a call.
  size_t Rows(const TileRange& part) const;

 private:
  // Calls visit(word, mask) for the words of the part's rows until it returns false.
  template <typename Visit>
  bool ForEachWord(const TileRange& part, Visit visit) const;

  const TileRange whole_;
  const size_t words_per_row_;
  int tiles_ = 0;
  std::vector<uint64_t> bits_;  // [layers of `whole`][words_per_row_]; empty before the first Add
};

}  // namespace crumb::storage
