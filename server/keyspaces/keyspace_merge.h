// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/page_key.h"
#include "crumb/v1/record.pb.h"

// Merges of the records that nodes have of a keyspace. Merging is commutative, associative and
// idempotent, so the order in which nodes receive changes does not matter.
namespace crumb::server {

// The changes that a merge made.
struct KeyspaceChanges {
  bool any = false;
  bool generation = false;
  bool state = false;
  std::vector<PageKey> deleted;  // pages that this node has to delete now
  bool all_deleted = false;      // deletions were forgotten before this node received them
  bool theirs_behind = false;    // `ours` has changes that `theirs` lacks
};

// Bounds of a record. They keep it below the limits of a gRPC message (4 MiB) and of an etcd
// request (1.5 MiB): a name or a value has at most 1,024 bytes, so fields take 68 KiB, deletions 1
// MiB and the numbers of forgotten deletions 192 KiB.
inline constexpr size_t kDeletionKeysMax = 16'384;            // pages that deletions list
inline constexpr size_t kDeletionBytesMax = size_t{1} << 20;  // encoded deletions
inline constexpr size_t kDeletionNodesMax = 2'048;            // nodes that ever deleted
inline constexpr size_t kNodeIdBytesMax = 64;

// kInvalidArgument, naming the field: a record that no crumbd makes.
absl::Status CheckRecord(const v1::KeyspaceRecord& record);

// Merges `theirs` into `ours`: takes the higher generation, the state with the higher version, and
// the union of deletions.
KeyspaceChanges MergeKeyspace(v1::KeyspaceRecord& ours, const v1::KeyspaceRecord& theirs);

// Forgets deletions while the record lists more than `keys_max` keys or takes more than
// kDeletionBytesMax bytes: the oldest of the node that lists the most. A node that has not received
// a forgotten deletion deletes all its pages of the keyspace. Returns whether any was forgotten.
bool ForgetDeletions(v1::KeyspaceRecord& record, size_t keys_max);

// Notes that `node` deleted pages, then forgets deletions beyond `keys_max` keys.
void AddDeletion(v1::KeyspaceRecord& record, const std::string& node,
                 const std::vector<PageKey>& keys, size_t keys_max);

}  // namespace crumb::server
