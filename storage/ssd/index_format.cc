// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/index_format.h"

#include <array>
#include <cstring>

#include "common/crc32c.h"
#include "common/little_endian.h"

namespace crumb::storage {
namespace {

static_assert(static_cast<char>(IndexKind::kFragment) == 'f');
static_assert(static_cast<char>(IndexKind::kAccess) == 'a');
static_assert(static_cast<char>(IndexKind::kGeneration) == 'g');
static_assert(static_cast<char>(IndexKind::kRecord) == 'r');

constexpr uint8_t kEntryVersion = 1;
constexpr size_t kIdBytes = 32;
constexpr size_t kFragmentKeyBytes = 1 + 2 * kIdBytes + 4;
constexpr size_t kEntryBytes = 84;
constexpr size_t kSumOffset = kEntryBytes - 4;

std::string KeyOf(IndexKind kind, std::initializer_list<std::string_view> parts) {
  std::string key(1, static_cast<char>(kind));
  for (const std::string_view part : parts) key += part;
  return key;
}

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

uint32_t SumOf(std::string_view key, std::span<const std::byte> value) {
  return Crc32c(value, Crc32c(Bytes(key)));
}

absl::Status CheckEntry(const IndexEntry& entry) {
  const FragmentMeta& meta = entry.meta;
  const bool ranges_ordered = meta.range.layers.begin < meta.range.layers.end &&
                              meta.range.heads.begin < meta.range.heads.end;
  if (!ranges_ordered || meta.tiles_bytes >= meta.bytes || meta.bytes > entry.slot.bytes ||
      meta.bytes - meta.tiles_bytes != FragmentHeaderBytes(meta.range.tiles())) {
    return absl::DataLossError("index entry holds impossible values");
  }
  return absl::OkStatus();
}

}  // namespace

std::string FragmentKey(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range) {
  std::array<std::byte, 4> corner;
  StoreLittle(corner.data(), range.layers.begin);
  StoreLittle(corner.data() + 2, range.heads.begin);
  return KeyOf(IndexKind::kFragment,
               {keyspace.view(), key.view(),
                std::string_view(reinterpret_cast<const char*>(corner.data()), corner.size())});
}

std::string AccessKey(const KeyspaceId& keyspace, const PageKey& key) {
  return KeyOf(IndexKind::kAccess, {keyspace.view(), key.view()});
}

std::string GenerationKey(const KeyspaceId& keyspace) {
  return KeyOf(IndexKind::kGeneration, {keyspace.view()});
}

std::string RecordKey(const std::string& name) { return KeyOf(IndexKind::kRecord, {name}); }

std::string EncodeIndexEntry(const IndexEntry& entry) {
  std::array<std::byte, kEntryBytes> value{};
  std::byte* to = value.data();
  StoreLittle(to, kEntryVersion);
  StoreLittle(to + 1, entry.slot.chunk_order);
  StoreLittle(to + 4, entry.meta.range.layers.end);
  StoreLittle(to + 6, entry.meta.range.heads.end);
  StoreLittle(to + 8, entry.meta.tiles_bytes);
  StoreLittle(to + 12, entry.meta.bytes);
  StoreLittle(to + 16, entry.meta.logical_tile_bytes);
  StoreLittle(to + 20, entry.slot.region);
  StoreLittle(to + 24, entry.slot.bytes);
  StoreLittle(to + 28, entry.meta.generation);
  StoreLittle(to + 36, entry.slot.offset);
  std::memcpy(to + 44, entry.meta.parent.bytes.data(), kIdBytes);
  const std::string key = FragmentKey(entry.meta.keyspace, entry.meta.key, entry.meta.range);
  StoreLittle(to + kSumOffset, SumOf(key, std::span(value).first(kSumOffset)));
  return {reinterpret_cast<const char*>(value.data()), value.size()};
}

absl::StatusOr<IndexEntry> DecodeIndexEntry(std::string_view key, std::string_view value) {
  const std::span<const std::byte> bytes = Bytes(value);
  if (key.size() != kFragmentKeyBytes || bytes.size() < kEntryBytes) {
    return absl::DataLossError("index entry has the wrong size");
  }
  const std::byte* from = bytes.data();
  if (const auto version = LoadLittle<uint8_t>(from); version != kEntryVersion) {
    return absl::FailedPreconditionError("index entry of version " + std::to_string(version));
  }
  if (LoadLittle<uint32_t>(from + kSumOffset) != SumOf(key, bytes.first(kSumOffset))) {
    return absl::DataLossError("index entry is damaged");
  }
  IndexEntry entry;
  std::memcpy(entry.meta.keyspace.bytes.data(), key.data() + 1, kIdBytes);
  std::memcpy(entry.meta.key.bytes.data(), key.data() + 1 + kIdBytes, kIdBytes);
  const std::byte* corner = Bytes(key).data() + 1 + 2 * kIdBytes;
  entry.meta.range.layers = {LoadLittle<uint16_t>(corner), LoadLittle<uint16_t>(from + 4)};
  entry.meta.range.heads = {LoadLittle<uint16_t>(corner + 2), LoadLittle<uint16_t>(from + 6)};
  entry.meta.tiles_bytes = LoadLittle<uint32_t>(from + 8);
  entry.meta.bytes = LoadLittle<uint32_t>(from + 12);
  entry.meta.logical_tile_bytes = LoadLittle<uint32_t>(from + 16);
  entry.slot.region = LoadLittle<uint32_t>(from + 20);
  entry.slot.bytes = LoadLittle<uint32_t>(from + 24);
  entry.meta.generation = LoadLittle<uint64_t>(from + 28);
  entry.slot.offset = LoadLittle<uint64_t>(from + 36);
  entry.slot.chunk_order = LoadLittle<uint8_t>(from + 1);
  std::memcpy(entry.meta.parent.bytes.data(), from + 44, kIdBytes);
  if (absl::Status status = CheckEntry(entry); !status.ok()) return status;
  return entry;
}

std::string EncodeNumber(uint64_t number) {
  std::array<std::byte, sizeof(number)> bytes;
  StoreLittle(bytes.data(), number);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

absl::StatusOr<uint64_t> DecodeNumber(std::string_view value) {
  if (value.size() != sizeof(uint64_t)) return absl::DataLossError("index number is damaged");
  return LoadLittle<uint64_t>(Bytes(value).data());
}

absl::StatusOr<std::pair<KeyspaceId, PageKey>> DecodeAccessKey(std::string_view key) {
  if (key.size() != 1 + 2 * kIdBytes) return absl::DataLossError("recency key is damaged");
  std::pair<KeyspaceId, PageKey> name;
  std::memcpy(name.first.bytes.data(), key.data() + 1, kIdBytes);
  std::memcpy(name.second.bytes.data(), key.data() + 1 + kIdBytes, kIdBytes);
  return name;
}

absl::StatusOr<KeyspaceId> DecodeGenerationKey(std::string_view key) {
  if (key.size() != 1 + kIdBytes) return absl::DataLossError("generation key is damaged");
  return KeyspaceId::FromBytes(key.substr(1));
}

}  // namespace crumb::storage
