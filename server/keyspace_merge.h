// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "common/page_key.h"
#include "crumb/v1/record.pb.h"

// What nodes know of a keyspace, brought together. Merging is commutative, associative and
// idempotent, so it does not matter who hears of what first.
namespace crumb::server {

// What a merge changed.
struct KeyspaceChanges {
  bool any = false;
  bool generation = false;
  bool state = false;
  std::vector<PageKey> deleted;  // pages that this node has to delete now
  bool all_deleted = false;      // deletions were forgotten before this node heard of them
  bool theirs_behind = false;    // `theirs` lacks what `ours` has
};

// Brings what `theirs` knows into `ours`. The generation only rises, of two states the one of the
// higher version counts, deletions are united.
KeyspaceChanges MergeKeyspace(v1::KeyspaceRecord& ours, const v1::KeyspaceRecord& theirs);

// Notes that `node` deleted pages; of its deletions the oldest are forgotten while more than
// `keys_max` keys are listed.
void AddDeletion(v1::KeyspaceRecord& record, const std::string& node,
                 const std::vector<PageKey>& keys, size_t keys_max);

}  // namespace crumb::server
