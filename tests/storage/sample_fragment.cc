// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/sample_fragment.h"

#include <cstring>
#include <random>
#include <string>

#include "common/crc32c.h"

namespace crumb::storage {
namespace {

void FillTile(std::span<std::byte> tile, const KeyspaceId& keyspace, const PageKey& key, int layer,
              int head) {
  uint64_t words[2];
  std::memcpy(&words[0], keyspace.bytes.data(), sizeof(words[0]));
  std::memcpy(&words[1], key.bytes.data(), sizeof(words[1]));
  uint64_t state = words[0] * 31 + words[1] + static_cast<uint64_t>(layer) * 1000003 +
                   static_cast<uint64_t>(head) * 7919 + 1;
  for (size_t i = 0; i < tile.size(); i += sizeof(state)) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(tile.data() + i, &state, std::min(sizeof(state), tile.size() - i));
  }
}

}  // namespace

KeyspaceId SampleKeyspace(uint64_t number) {
  return KeyspaceId{Sha256("keyspace " + std::to_string(number))};
}

PageKey SampleKey(uint64_t sequence, uint64_t number) {
  return PageKey{Sha256("page " + std::to_string(sequence) + " " + std::to_string(number))};
}

SampleFragment SamplePage(uint64_t sequence, uint64_t number) {
  SampleFragment sample;
  sample.keyspace = SampleKeyspace(0);
  sample.key = SampleKey(sequence, number);
  if (number > 0) sample.parent = SampleKey(sequence, number - 1);
  return sample;
}

std::vector<std::byte> BytesOf(const SampleFragment& sample) {
  FragmentHeader header;
  header.tile_bytes = sample.tile_bytes;
  header.generation = sample.generation;
  header.keyspace = sample.keyspace;
  header.key = sample.key;
  header.parent = sample.parent;
  header.range = sample.range;
  std::vector<std::byte> bytes(FragmentBytes(sample.range.tiles(), sample.tile_bytes));
  std::span<std::byte> rest(bytes);
  for (int layer = sample.range.layers.begin; layer < sample.range.layers.end; ++layer) {
    for (int head = sample.range.heads.begin; head < sample.range.heads.end; ++head) {
      const std::span<std::byte> tile = rest.first(sample.tile_bytes);
      FillTile(tile, sample.keyspace, sample.key, layer, head);
      header.tile_sums.push_back(Crc32c(tile));
      rest = rest.subspan(sample.tile_bytes);
    }
  }
  EncodeFragmentHeader(header, rest);
  return bytes;
}

FragmentMeta MetaOf(const SampleFragment& sample) {
  const int tiles = sample.range.tiles();
  return {.keyspace = sample.keyspace,
          .key = sample.key,
          .parent = sample.parent,
          .generation = sample.generation,
          .range = sample.range,
          .tiles_bytes = static_cast<uint32_t>(FragmentTilesBytes(tiles, sample.tile_bytes)),
          .bytes = static_cast<uint32_t>(FragmentBytes(tiles, sample.tile_bytes)),
          .logical_tile_bytes = sample.tile_bytes * 7};
}

CommitRequest CommitOf(const SampleFragment& sample, std::span<const std::byte> bytes) {
  const FragmentMeta meta = MetaOf(sample);
  return {.header = *DecodeFragmentHeader(bytes.subspan(meta.tiles_bytes)),
          .tiles = bytes.first(meta.tiles_bytes),
          .logical_tile_bytes = meta.logical_tile_bytes};
}

bool IsRight(std::span<const std::byte> bytes, const KeyspaceId& keyspace, const PageKey& key,
             uint32_t tiles_bytes) {
  const auto header = DecodeFragmentHeader(bytes.subspan(tiles_bytes));
  if (!header.ok() || header->keyspace != keyspace || header->key != key) return false;
  std::vector<std::byte> expected(header->tile_bytes);
  size_t offset = 0;
  for (int layer = header->range.layers.begin; layer < header->range.layers.end; ++layer) {
    for (int head = header->range.heads.begin; head < header->range.heads.end; ++head) {
      FillTile(expected, keyspace, key, layer, head);
      if (std::memcmp(expected.data(), bytes.data() + offset, expected.size()) != 0) return false;
      offset += expected.size();
    }
  }
  return offset == tiles_bytes;
}

}  // namespace crumb::storage
