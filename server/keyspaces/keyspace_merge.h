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
  bool theirs_behind = false;    // `theirs` lacks what `ours` has
};

// Bounds of a record, which keep it below what one message of gRPC (4 MiB) and one request of etcd
// (1.5 MiB) carry: a name or a value is at most 1,024 bytes, so fields take 68 KiB, deletions 1 MiB
// and the numbers of forgotten deletions 192 KiB.
inline constexpr size_t kDeletionKeysMax = 16'384;            // pages that deletions list
inline constexpr size_t kDeletionBytesMax = size_t{1} << 20;  // encoded deletions
inline constexpr size_t kDeletionNodesMax = 2'048;            // nodes that ever deleted
inline constexpr size_t kNodeIdBytesMax = 64;

// kInvalidArgument, naming the field: a record that no crumbd makes.
absl::Status CheckRecord(const v1::KeyspaceRecord& record);

// Brings what `theirs` knows into `ours`. The generation only rises, of two states the one of the
// higher version counts, deletions are united.
KeyspaceChanges MergeKeyspace(v1::KeyspaceRecord& ours, const v1::KeyspaceRecord& theirs);

// Forgets deletions while the record lists more than `keys_max` keys or takes more than
// kDeletionBytesMax bytes: the oldest of the node that lists the most. A node that has not received
// a forgotten deletion deletes all its pages of the keyspace. Returns whether any was forgotten.
bool ForgetDeletions(v1::KeyspaceRecord& record, size_t keys_max);

// Notes that `node` deleted pages, then forgets deletions beyond `keys_max` keys.
void AddDeletion(v1::KeyspaceRecord& record, const std::string& node,
                 const std::vector<PageKey>& keys, size_t keys_max);

}  // namespace crumb::server
