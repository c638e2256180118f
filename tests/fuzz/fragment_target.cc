// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Fragments in slots, extents and streams, and entries of the SSD tier's index. The first byte says
// the kind of the rest; checksums are made right, for wrong ones end at the first check.
#include <algorithm>

#include "common/crc32c.h"
#include "common/fragment_header.h"
#include "common/little_endian.h"
#include "storage/fragment_tier.h"
#include "storage/ssd/index_format.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

enum class Kind : unsigned char { kHeader, kFragment, kEntry, kKeys, kKinds };

constexpr uint32_t kTileBytes = 128;

// Puts the sum that the format has at its end over the bytes before.
void CorrectSum(std::span<std::byte> bytes) {
  if (bytes.size() < 4) return;
  const auto content = bytes.first(bytes.size() - 4);
  StoreLittle(content.data() + content.size(), Crc32c(content));
}

void RunHeader(std::vector<std::byte> bytes) {
  constexpr size_t kSizeOffset = 8;  // docs/formats/fragment.md
  if (bytes.size() >= FragmentHeaderBytes(0)) {
    const auto size = LoadLittle<uint32_t>(bytes.data() + kSizeOffset);
    if (size <= bytes.size()) CorrectSum(std::span(bytes).first(size));
  }
  const auto header = DecodeFragmentHeader(bytes);
  if (!header.ok()) return;
  Check(header->range.tiles() > 0 && header->range.tiles() <= kFragmentTilesMax);
  Check(header->tile_sums.size() == static_cast<size_t>(header->range.tiles()));
  Check(header->tile_bytes <= kTileBytesMax);
  const FragmentShape shape = ShapeOfHeader(bytes);
  Check(shape.range == header->range && shape.tile_bytes == header->tile_bytes);
  std::vector<std::byte> again(FragmentHeaderBytes(header->range.tiles()));
  EncodeFragmentHeader(*header, again);
  const auto decoded = DecodeFragmentHeader(again);
  Check(decoded.ok() && *decoded == *header);
}

// Checks bytes as if they were read from a slot whose index entry fits them.
void RunFragment(std::span<const std::byte> bytes) {
  if (bytes.size() < 8) return;
  storage::FragmentMeta meta;
  meta.tiles_bytes = LoadLittle<uint32_t>(bytes.data());
  meta.bytes = LoadLittle<uint32_t>(bytes.data() + 4);
  meta.range = {{0, 1}, {0, 2}};
  meta.key.bytes.fill(7);
  const auto fragment = bytes.subspan(8);
  if (!storage::VerifyFragment(meta, fragment).ok()) return;
  Check(storage::CheckFragmentHeader(meta, fragment).ok());
  Check(meta.tiles_bytes < meta.bytes && meta.bytes <= fragment.size());
}

void RunEntry(std::string bytes) {
  constexpr size_t kKeyBytes = 69;  // docs/formats/ssd-folder.md
  constexpr size_t kSumOffset = 80;
  if (bytes.size() < kKeyBytes) return;
  const std::string key = bytes.substr(0, kKeyBytes);
  std::string value = bytes.substr(kKeyBytes);
  if (value.size() >= kSumOffset + 4) {
    StoreLittle(reinterpret_cast<std::byte*>(value.data()) + kSumOffset,
                Crc32c(BytesOf(value).first(kSumOffset), Crc32c(BytesOf(key))));
  }
  const auto entry = storage::DecodeIndexEntry(key, value);
  if (!entry.ok()) return;
  Check(entry->meta.range.tiles() > 0);
  Check(entry->meta.bytes > entry->meta.tiles_bytes);
  const auto again = storage::DecodeIndexEntry(
      storage::FragmentKey(entry->meta.keyspace, entry->meta.key, entry->meta.range),
      storage::EncodeIndexEntry(*entry));
  Check(again.ok() && *again == *entry);
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto rest = input.subspan(1);
  switch (
      static_cast<Kind>(static_cast<unsigned>(input[0]) % static_cast<unsigned>(Kind::kKinds))) {
    case Kind::kHeader:
      return RunHeader({rest.begin(), rest.end()});
    case Kind::kFragment:
      return RunFragment(rest);
    case Kind::kEntry:
      return RunEntry(TextOf(rest));
    default:
      storage::DecodeAccessKey(TextOf(rest)).status().IgnoreError();
      storage::DecodeGenerationKey(TextOf(rest)).status().IgnoreError();
      storage::DecodeNumber(TextOf(rest)).status().IgnoreError();
  }
}

std::vector<std::string> Seeds() {
  FragmentHeader header;
  header.tile_bytes = kTileBytes;
  header.key.bytes.fill(7);
  header.range = {{0, 1}, {0, 2}};
  std::vector<std::byte> fragment(FragmentBytes(2, kTileBytes), std::byte{3});
  header.tile_sums.assign(2, Crc32c(std::span(fragment).first(kTileBytes)));
  const size_t tiles_bytes = FragmentTilesBytes(2, kTileBytes);
  EncodeFragmentHeader(header, std::span(fragment).subspan(tiles_bytes));
  std::string sizes(8, '\0');
  StoreLittle(reinterpret_cast<std::byte*>(sizes.data()), static_cast<uint32_t>(tiles_bytes));
  StoreLittle(reinterpret_cast<std::byte*>(sizes.data()) + 4,
              static_cast<uint32_t>(fragment.size()));
  storage::IndexEntry entry;
  entry.meta = {.keyspace = header.keyspace,
                .key = header.key,
                .parent = {},
                .generation = 1,
                .range = header.range,
                .tiles_bytes = static_cast<uint32_t>(tiles_bytes),
                .bytes = static_cast<uint32_t>(fragment.size()),
                .logical_tile_bytes = 32768};
  entry.slot = {.region = 1, .bytes = 1024, .offset = 2048, .chunk_order = 0};
  const std::string key = storage::FragmentKey(header.keyspace, header.key, header.range);
  return {std::string("\0", 1) + TextOf(fragment).substr(tiles_bytes),
          std::string("\1", 1) + sizes + TextOf(fragment),
          std::string("\2", 1) + key + storage::EncodeIndexEntry(entry),
          std::string("\3", 1) + storage::AccessKey(header.keyspace, header.key)};
}

}  // namespace

const FuzzTarget kFragmentTarget = {"fragment", Run, Seeds};

}  // namespace crumb::fuzz
