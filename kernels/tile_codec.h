// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tile.h"

// Where each code, scale and minimum lies in an INT2 tile: docs/formats/page-tile.md as code. For
// tools, references and tests; the kernels walk the same order word by word.
namespace crumb::kernels {

enum class TilePart { kKey, kValue };

// Two bits of a 32-bit little-endian word.
struct CodePosition {
  size_t word_offset = 0;  // bytes from the tile's begin, a multiple of 4
  int bit = 0;             // of the code's lower bit in the word
};

// token in [0, shape.tokens), channel in [0, shape.head_dim) in rotated order.
CodePosition CodePositionOf(const TileShape& shape, TilePart part, int token, int channel);

// Bytes from the tile's begin to the fp16 scale; the fp16 minimum follows it.
size_t MetaOffsetOf(const TileShape& shape, TilePart part, int token, int group);

// One row's scale and minimum of one group, as the bits of two halves.
struct RowMeta {
  uint16_t scale = 0;
  uint16_t minimum = 0;
};

uint8_t ReadCode(const TileShape& shape, const uint8_t* tile, TilePart part, int token,
                 int channel);
// `code` in 0..3. The other bits of the tile stay as they are.
void WriteCode(const TileShape& shape, TilePart part, int token, int channel, uint8_t code,
               uint8_t* tile);

RowMeta ReadMeta(const TileShape& shape, const uint8_t* tile, TilePart part, int token, int group);
void WriteMeta(const TileShape& shape, TilePart part, int token, int group, RowMeta meta,
               uint8_t* tile);

}  // namespace crumb::kernels
