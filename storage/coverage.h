// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "common/fragment_header.h"

// Which tiles of a page are there, as rectangles of layers and heads.
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

}  // namespace crumb::storage
