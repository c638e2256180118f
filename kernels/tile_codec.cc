// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/tile_codec.h"

namespace crumb::kernels {
namespace {

// Number of words of a lane that lie side by side: one 16-byte load, or 8 bytes at head_dim 64.
int WordsPerLane(const TileShape& shape) { return shape.head_dim % 128 == 0 ? 4 : 2; }

size_t WordOffset(const TileShape& shape, int token_group, int lane, int word) {
  const int w = WordsPerLane(shape);
  return static_cast<size_t>(4 * shape.head_dim * token_group + 128 * w * (word / w) +
                             4 * w * lane + 4 * (word % w));
}

uint32_t LoadLittle32(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 |
         static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24;
}

void StoreLittle32(uint32_t value, uint8_t* p) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(value >> (8 * i));
}

}  // namespace

CodePosition CodePositionOf(const TileShape& shape, TilePart part, int token, int channel) {
  // The fragment's rows are tokens for K and channels for V; its columns are the other dimension.
  const bool key = part == TilePart::kKey;
  const int row = (key ? token : channel) % 16;
  const int column = (key ? channel : token) % 16;
  const int r = row % 8, a = row / 8;
  const int b = column / 8, c = column % 8 / 2, e = column % 2;
  const int step = channel / 16;
  const int word = 2 * (step / 4) + (key ? a : b);
  const size_t base = key ? 0 : shape.code_bytes();
  return {base + WordOffset(shape, token / 16, 4 * r + c, word),
          2 * (2 * (step % 4) + (key ? b : a)) + 16 * e};
}

size_t MetaOffsetOf(const TileShape& shape, TilePart part, int token, int group) {
  const int r = token % 8, a = token % 16 / 8, u = token / 16;
  const size_t base = 2 * shape.code_bytes() + (part == TilePart::kKey ? 0 : shape.meta_bytes());
  return base +
         static_cast<size_t>(4 * shape.tokens * group + shape.tokens / 2 * r + 4 * (2 * u + a));
}

uint8_t ReadCode(const TileShape& shape, const uint8_t* tile, TilePart part, int token,
                 int channel) {
  const CodePosition at = CodePositionOf(shape, part, token, channel);
  return static_cast<uint8_t>(LoadLittle32(tile + at.word_offset) >> at.bit & 3u);
}

void WriteCode(const TileShape& shape, TilePart part, int token, int channel, uint8_t code,
               uint8_t* tile) {
  const CodePosition at = CodePositionOf(shape, part, token, channel);
  const uint32_t word = LoadLittle32(tile + at.word_offset);
  StoreLittle32((word & ~(3u << at.bit)) | static_cast<uint32_t>(code & 3u) << at.bit,
                tile + at.word_offset);
}

RowMeta ReadMeta(const TileShape& shape, const uint8_t* tile, TilePart part, int token, int group) {
  const uint32_t word = LoadLittle32(tile + MetaOffsetOf(shape, part, token, group));
  return {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16)};
}

void WriteMeta(const TileShape& shape, TilePart part, int token, int group, RowMeta meta,
               uint8_t* tile) {
  StoreLittle32(static_cast<uint32_t>(meta.minimum) << 16 | meta.scale,
                tile + MetaOffsetOf(shape, part, token, group));
}

bool HasRowWithoutScale(const TileShape& shape, const uint8_t* tile) {
  const size_t begin = 2 * shape.code_bytes();
  const size_t end = begin + 2 * shape.meta_bytes();
  for (size_t at = begin; at < end; at += 4) {
    if (LoadLittle32(tile + at) == 0) return true;
  }
  return false;
}

}  // namespace crumb::kernels
