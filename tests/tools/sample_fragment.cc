// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/tools/sample_fragment.h"

#include <cstring>
#include <random>

#include "common/crc32c.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/tile_codec.h"

namespace crumb::tools {
namespace {

FragmentHeader HeaderFor(PageFormat format, size_t tile_bytes, uint32_t seed) {
  FragmentHeader header;
  header.format = format;
  header.tile_bytes = static_cast<uint32_t>(tile_bytes);
  header.generation = 7;
  header.keyspace.bytes.fill(0xab);
  header.key.bytes.fill(static_cast<uint8_t>(seed));
  header.range = {{2, 4}, {1, 3}};
  return header;
}

FragmentFile Seal(FragmentHeader header, std::vector<std::byte> tiles) {
  for (size_t at = 0; at < tiles.size(); at += header.tile_bytes) {
    header.tile_sums.push_back(Crc32c(std::span(tiles).subspan(at, header.tile_bytes)));
  }
  return {std::move(header), std::move(tiles)};
}

}  // namespace

FragmentFile SampleInt2Fragment(const kernels::TileShape& shape, uint32_t seed) {
  FragmentHeader header = HeaderFor(PageFormat::kInt2, shape.int2_bytes(), seed);
  std::vector<std::byte> tiles(FragmentTilesBytes(header.range.tiles(), header.tile_bytes));
  std::mt19937 random(seed);
  for (std::byte& byte : tiles) byte = static_cast<std::byte>(random());
  std::uniform_real_distribution<float> scale(0.01f, 1.0f), minimum(-3.0f, 0.0f);
  bool saturated = false;
  for (int tile = 0; tile < header.range.tiles(); ++tile) {
    auto* bytes = reinterpret_cast<uint8_t*>(tiles.data()) + tile * shape.int2_bytes();
    for (const auto part : {kernels::TilePart::kKey, kernels::TilePart::kValue}) {
      for (int token = 0; token < shape.tokens; ++token) {
        for (int group = 0; group < shape.groups(); ++group) {
          kernels::WriteMeta(shape, part, token, group,
                             {kernels::Fp16FromFloat(scale(random), &saturated),
                              kernels::Fp16FromFloat(minimum(random), &saturated)},
                             bytes);
        }
      }
    }
  }
  return Seal(std::move(header), std::move(tiles));
}

FragmentFile SampleBf16Fragment(int head_dim, uint32_t seed) {
  const kernels::TileShape shape{64, head_dim, 64};
  FragmentHeader header = HeaderFor(PageFormat::kBf16, shape.bf16_bytes(), seed);
  std::vector<std::byte> tiles(FragmentTilesBytes(header.range.tiles(), header.tile_bytes));
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> value(-2.0f, 2.0f);
  for (size_t at = 0; at < tiles.size(); at += 2) {
    const kernels::Bf16 element = kernels::Bf16FromFloat(value(random));
    std::memcpy(tiles.data() + at, &element.bits, 2);
  }
  return Seal(std::move(header), std::move(tiles));
}

std::vector<std::byte> EncodeFragment(const FragmentFile& fragment) {
  std::vector<std::byte> bytes = fragment.tiles;
  bytes.resize(bytes.size() + FragmentHeaderBytes(fragment.header.range.tiles()));
  EncodeFragmentHeader(fragment.header, std::span(bytes).subspan(fragment.tiles.size()));
  return bytes;
}

}  // namespace crumb::tools
