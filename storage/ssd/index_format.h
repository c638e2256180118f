// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/fragment_tier.h"
#include "storage/slot_allocator.h"

// Keys and values of the SSD tier's index: docs/formats/ssd-folder.md.
namespace crumb::storage {

struct IndexEntry {
  FragmentMeta meta;
  Slot slot;

  friend bool operator==(const IndexEntry&, const IndexEntry&) = default;
};

// The first byte of a key. Persisted: values are frozen.
enum class IndexKind : char { kFragment = 'f', kAccess = 'a', kGeneration = 'g', kRecord = 'r' };

std::string FragmentKey(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range);
std::string AccessKey(const KeyspaceId& keyspace, const PageKey& key);
std::string GenerationKey(const KeyspaceId& keyspace);
std::string RecordKey(const std::string& name);

std::string EncodeIndexEntry(const IndexEntry& entry);
// kDataLoss: damaged or impossible; kFailedPrecondition: written by a newer version.
absl::StatusOr<IndexEntry> DecodeIndexEntry(std::string_view key, std::string_view value);

std::string EncodeNumber(uint64_t number);
absl::StatusOr<uint64_t> DecodeNumber(std::string_view value);

absl::StatusOr<std::pair<KeyspaceId, PageKey>> DecodeAccessKey(std::string_view key);
absl::StatusOr<KeyspaceId> DecodeGenerationKey(std::string_view key);

// Changes that become durable together. Without a value a key is deleted.
struct IndexBatch {
  std::vector<std::pair<std::string, std::optional<std::string>>> changes;

  void Put(std::string key, std::string value) {
    changes.emplace_back(std::move(key), std::move(value));
  }
  void Delete(std::string key) { changes.emplace_back(std::move(key), std::nullopt); }
};

}  // namespace crumb::storage
