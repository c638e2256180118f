// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/record_merger.h"

#include "common/limited_log.h"
#include "common/status_macros.h"

namespace crumb::server {

absl::Status RecordMerger::Merge(const std::vector<v1::KeyspaceEntry>& entries) {
  absl::Status first;
  for (const v1::KeyspaceEntry& entry : entries) first.Update(MergeEntry(entry));
  return first;
}

absl::Status RecordMerger::MergeEntry(const v1::KeyspaceEntry& entry) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId id, KeyspaceId::FromBytes(entry.keyspace()));
  const auto named = parts_.keyspaces.PreviewMerge(id, entry.record());
  if (!named.ok()) return Refuse(id, named.status());
  CRUMB_RETURN_IF_ERROR(RemoveDeleted(id, *named));
  // Another thread may have merged meanwhile; then this names fewer changes than the preview.
  const auto changes = parts_.keyspaces.Merge(id, entry.record(), parts_.deletions_max);
  if (!changes.ok()) return Refuse(id, changes.status());
  if (changes->any) parts_.metrics.keyspace_merges.Add();
  if (changes->generation) Drop(id);
  if (changes->state || changes->generation) parts_.state_changed(id);
  return absl::OkStatus();
}

absl::Status RecordMerger::RemoveDeleted(const KeyspaceId& id, const KeyspaceChanges& changes) {
  std::vector<PageKey> deleted = changes.deleted;
  if (changes.all_deleted) {
    parts_.store.ForEachPage(id, [&deleted](const PageKey& key, Tier) { deleted.push_back(key); });
    LogWarningLimited(
        "keyspace {}: deletions were forgotten before this node received them: deleting "
        "all its {} pages",
        id.ToHex(), deleted.size());
  }
  if (deleted.empty()) return absl::OkStatus();
  if (parts_.deleted) parts_.deleted(id, deleted);
  const absl::Status gone = parts_.store.Delete(id, deleted).status();
  if (gone.ok()) return gone;
  parts_.metrics.records_refused.Add();
  LogWarningLimited(
      "keyspace {}: {} pages that another node deleted are served no more, but could not be "
      "removed durably: {}",
      id.ToHex(), deleted.size(), gone.ToString());
  return gone;
}

absl::Status RecordMerger::Refuse(const KeyspaceId& id, const absl::Status& why) {
  parts_.metrics.records_refused.Add();
  LogWarningLimited("another node's record of keyspace {} is left out: {}", id.ToHex(),
                    why.ToString());
  if (parts_.keyspaces.Find(id) != nullptr) return why;
  // This node has no page of a keyspace that it does not know.
  left_out_ = true;
  return absl::OkStatus();
}

void RecordMerger::Drop(const KeyspaceId& id) {
  const auto keyspace = parts_.keyspaces.Find(id);
  if (keyspace == nullptr) return;
  const uint64_t generation = keyspace->generation.load();
  const absl::StatusOr<uint64_t> pages = parts_.store.DropKeyspace(id, generation);
  LogInfoLimited("keyspace {} was dropped by another node: {} pages, generation {} now{}",
                 id.ToHex(), pages.value_or(0), generation,
                 pages.ok() ? "" : "; their room is not free yet: " + pages.status().ToString());
}

}  // namespace crumb::server
