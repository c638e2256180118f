// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tile.h"

// The place of each code, scale and minimum in an INT2 tile: docs/formats/page-tile.md as code. It
// serves tools, references and tests; the kernels walk the same order word by word.
namespace crumb::kernels {

enum class TilePart { kKey, kValue };

// The position of a code: two bits of a 32-bit little-endian word.
struct CodePosition {
  size_t word_offset = 0;  // bytes from the tile's begin, a multiple of 4
  int bit = 0;             // the code's lower bit in the word
};

// Returns the position of a code. `token` is in [0, shape.tokens), `channel` in [0, shape.head_dim)
// in the rotated basis.
CodePosition CodePositionOf(const TileShape& shape, TilePart part, int token, int channel);

// Returns the offset of the fp16 scale from the tile's begin, in bytes. The fp16 minimum follows
// it.
size_t MetaOffsetOf(const TileShape& shape, TilePart part, int token, int group);

// Scale and minimum of one row and group, as the bits of two halves.
struct RowMeta {
  uint16_t scale = 0;
  uint16_t minimum = 0;
};

uint8_t ReadCode(const TileShape& shape, const uint8_t* tile, TilePart part, int token,
                 int channel);
// Writes `code`, 0 to 3, and keeps the other bits of the tile.
void WriteCode(const TileShape& shape, TilePart part, int token, int channel, uint8_t code,
               uint8_t* tile);

RowMeta ReadMeta(const TileShape& shape, const uint8_t* tile, TilePart part, int token, int group);
void WriteMeta(const TileShape& shape, TilePart part, int token, int group, RowMeta meta,
               uint8_t* tile);

// Returns whether the scale and the minimum of a row and group are zero. Quantize calls write such
// rows in place of those that are not finite, and for rows of zeros.
bool HasRowWithoutScale(const TileShape& shape, const uint8_t* tile);

}  // namespace crumb::kernels
