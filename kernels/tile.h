// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/page_format.h"

// Shapes and sizes of page tiles, the part of a page that belongs to one (layer, KV head).
// docs/formats/page-tile.md, layout id 1, defines the order of bytes inside an INT2 tile.
namespace crumb::kernels {

inline constexpr uint32_t kTileLayoutId = 1;
inline constexpr int kMaxQueryHeadsPerKvHead = 64;

// Brain floating point, the upper half of an IEEE single. It is plain storage; bf16.h converts it.
struct Bf16 {
  uint16_t bits = 0;
};

using crumb::PageFormat;

// The parameters of a tile's layout. Valid are 32, 64 or 128 tokens, head_dim 64, 128 or 256, and
// group_size 32, 64 or 128 up to head_dim.
struct TileShape {
  int tokens = 64;
  int head_dim = 128;
  int group_size = 128;

  constexpr bool Valid() const {
    return (tokens == 32 || tokens == 64 || tokens == 128) &&
           (head_dim == 64 || head_dim == 128 || head_dim == 256) &&
           (group_size == 32 || group_size == 64 || group_size == 128) && group_size <= head_dim;
  }
  constexpr int groups() const { return head_dim / group_size; }
  // Bytes of the codes of K, or of V: two bits per element.
  constexpr size_t code_bytes() const { return static_cast<size_t>(tokens) * head_dim / 4; }
  // Bytes of the scales and minima of K, or of V: two fp16 per row and group.
  constexpr size_t meta_bytes() const { return static_cast<size_t>(tokens) * groups() * 4; }
  constexpr size_t int2_bytes() const { return 2 * (code_bytes() + meta_bytes()); }
  constexpr size_t bf16_bytes() const { return static_cast<size_t>(tokens) * head_dim * 4; }
  constexpr size_t bytes(PageFormat format) const {
    return format == PageFormat::kInt2 ? int2_bytes() : bf16_bytes();
  }
  friend constexpr bool operator==(const TileShape&, const TileShape&) = default;
};

static_assert(TileShape{64, 128, 128}.int2_bytes() == 4608);

}  // namespace crumb::kernels
