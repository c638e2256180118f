// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/recovered_index.h"

#include <algorithm>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "common/status_macros.h"

namespace crumb::storage {
namespace {

using Name = std::pair<KeyspaceId, PageKey>;

// A larger count of accesses is damage: accesses that follow must still be larger than it.
constexpr uint64_t kAccessMax = UINT64_MAX / 2;

// How many ancestors each page has among the entries; a ring of parents counts to where it closes.
class DepthTable {
 public:
  explicit DepthTable(const std::vector<IndexEntry>& entries) {
    for (const IndexEntry& entry : entries) {
      parents_[{entry.meta.keyspace, entry.meta.key}] = entry.meta.parent;
    }
  }

  uint32_t Of(const Name& name) {
    std::vector<Name> path;
    Name at = name;
    while (!depths_.contains(at)) {
      const auto found = parents_.find(at);
      if (found == parents_.end()) break;
      depths_[at] = 0;  // closes rings
      path.push_back(at);
      at.second = found->second;
    }
    const auto known = depths_.find(at);
    uint32_t depth = known == depths_.end() ? 0 : known->second + 1;
    for (auto page = path.rbegin(); page != path.rend(); ++page) depths_[*page] = depth++;
    return depths_[name];
  }

 private:
  absl::flat_hash_map<Name, PageKey> parents_;
  absl::flat_hash_map<Name, uint32_t> depths_;
};

}  // namespace

absl::StatusOr<RecoveredIndex> ReadIndex(const SsdIndex& index) {
  RecoveredIndex read;
  CRUMB_RETURN_IF_ERROR(index.ForEach(IndexKind::kFragment, [&](auto key, auto value) {
    absl::StatusOr<IndexEntry> entry = DecodeIndexEntry(key, value);
    if (entry.ok()) {
      read.entries.push_back(*std::move(entry));
    } else {
      read.damaged.Delete(std::string(key));
    }
  }));
  CRUMB_RETURN_IF_ERROR(index.ForEach(IndexKind::kAccess, [&](auto key, auto value) {
    const auto name = DecodeAccessKey(key);
    const auto access = DecodeNumber(value);
    if (name.ok() && access.ok() && *access <= kAccessMax) {
      read.accesses[*name] = *access;
    } else {
      read.damaged.Delete(std::string(key));
    }
  }));
  CRUMB_RETURN_IF_ERROR(index.ForEach(IndexKind::kGeneration, [&](auto key, auto value) {
    const auto keyspace = DecodeGenerationKey(key);
    const auto generation = DecodeNumber(value);
    if (keyspace.ok() && generation.ok()) read.generations.emplace_back(*keyspace, *generation);
  }));
  CRUMB_RETURN_IF_ERROR(index.ForEach(IndexKind::kRecord, [&](auto key, auto value) {
    read.records[std::string(key.substr(1))] = std::string(value);
  }));
  return read;
}

void SortByRecency(const AccessMap& accesses, std::vector<IndexEntry>* entries) {
  struct Rank {
    uint64_t access = 0;
    uint32_t height = 0;  // deepest first
    Name name;
    size_t index = 0;
    bool operator<(const Rank& other) const {
      return std::tie(access, height, name, index) <
             std::tie(other.access, other.height, other.name, other.index);
    }
  };
  DepthTable depths(*entries);
  std::vector<Rank> ranks;
  ranks.reserve(entries->size());
  for (size_t i = 0; i < entries->size(); ++i) {
    const Name name = {(*entries)[i].meta.keyspace, (*entries)[i].meta.key};
    const auto access = accesses.find(name);
    ranks.push_back(
        {access == accesses.end() ? 0 : access->second, UINT32_MAX - depths.Of(name), name, i});
  }
  std::sort(ranks.begin(), ranks.end());
  std::vector<IndexEntry> sorted;
  sorted.reserve(entries->size());
  for (const Rank& rank : ranks) sorted.push_back((*entries)[rank.index]);
  *entries = std::move(sorted);
}

}  // namespace crumb::storage
