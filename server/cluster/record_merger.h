// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "common/page_key.h"
#include "crumb/v1/peer_service.pb.h"
#include "server/cluster/cluster_metrics.h"
#include "server/keyspaces/keyspace_registry.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Brings other nodes' records of keyspaces into force here: in the registry, whose records are
// durable, and in the store.
//
// Invariant: a durable record never lists a deletion whose pages a restart could bring back.
// A record is therefore merged in this order:
//   1. the pages that it names as deleted are removed from the store, durably;
//   2. the merged record is written; from here on the deletion is never named again;
//   3. older generations are dropped from the store, and sessions are notified of the change.
// A crash or an error before 2 leaves the record as it was, so that the next exchange names the
// deletion again. A crash between 2 and 3 leaves older pages on the SSD that are misses, because
// the record has the higher generation.
// Thread-safe.
class RecordMerger {
 public:
  struct Parts {
    storage::TieredStore& store;
    KeyspaceRegistry& keyspaces;
    ClusterMetrics& metrics;
    size_t deletions_max = kDeletionKeysMax;
    // A keyspace's state or generation was changed by another node.
    std::function<void(const KeyspaceId&)> state_changed;
    // Pages that another node deleted are about to be removed here.
    std::function<void(const KeyspaceId&, const std::vector<PageKey>&)> deleted = {};
  };

  // The members of `parts` must outlive this.
  explicit RecordMerger(Parts parts) : parts_(std::move(parts)) {}

  // Merges every entry that can be merged. Blocks on the SSD tier. Not OK: a drop or a deletion
  // that one of the entries names is not in force here, or not durably.
  absl::Status Merge(const std::vector<v1::KeyspaceEntry>& entries);

  // Returns whether a keyspace that this node does not know was left out for want of room since the
  // last call.
  bool TakeLeftOut() { return left_out_.exchange(false); }

 private:
  absl::Status MergeEntry(const v1::KeyspaceEntry& entry);
  absl::Status RemoveDeleted(const KeyspaceId& id, const KeyspaceChanges& changes);
  absl::Status Refuse(const KeyspaceId& id, const absl::Status& why);
  void Drop(const KeyspaceId& id);

  const Parts parts_;
  std::atomic<bool> left_out_{false};
};

}  // namespace crumb::server
