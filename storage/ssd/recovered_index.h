// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/ssd/index_format.h"
#include "storage/ssd/ssd_index.h"

namespace crumb::storage {

// The last access of each page, as far as it was durable.
using AccessMap = std::map<std::pair<KeyspaceId, PageKey>, uint64_t>;

// The content of an index, before it is compared with the extents.
struct RecoveredIndex {
  std::vector<IndexEntry> entries;
  AccessMap accesses;
  std::vector<std::pair<KeyspaceId, uint64_t>> generations;
  std::map<std::string, std::string> records;
  IndexBatch damaged;  // deletes the entries that cannot be read
};

// Reads everything. kDataLoss: the index is damaged.
absl::StatusOr<RecoveredIndex> ReadIndex(const SsdIndex& index);

// Sorts entries in the order in which a policy must receive them again: least recently used first,
// and pages of the same access deepest first. Fragments of a page stay together.
void SortByRecency(const AccessMap& accesses, std::vector<IndexEntry>* entries);

}  // namespace crumb::storage
