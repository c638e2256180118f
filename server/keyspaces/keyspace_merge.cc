// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/keyspaces/keyspace_merge.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace crumb::server {
namespace {

// The newest deletion of each node that the record knows of, listed or forgotten.
std::map<std::string, uint64_t> NewestDeletions(const v1::KeyspaceRecord& record) {
  std::map<std::string, uint64_t> newest(record.forgotten_deletions().begin(),
                                         record.forgotten_deletions().end());
  for (const v1::Deletion& deletion : record.deletions()) {
    uint64_t& number = newest[deletion.node()];
    number = std::max(number, deletion.number());
  }
  return newest;
}

uint64_t NumberOf(const std::map<std::string, uint64_t>& newest, const std::string& node) {
  const auto found = newest.find(node);
  return found == newest.end() ? 0 : found->second;
}

// Older first; on equal versions the careful state, so that all nodes choose alike.
auto StateRank(const v1::KeyspaceRecord& record) {
  return std::make_tuple(record.state_version(), static_cast<int>(record.state()),
                         record.state_who(), record.state_reason());
}

void MergeState(v1::KeyspaceRecord& ours, const v1::KeyspaceRecord& theirs,
                KeyspaceChanges& changes) {
  if (StateRank(theirs) < StateRank(ours)) changes.theirs_behind = true;
  if (StateRank(theirs) <= StateRank(ours)) return;
  changes.state = ours.state() != theirs.state();
  changes.any = true;
  ours.set_state(theirs.state());
  ours.set_state_who(theirs.state_who());
  ours.set_state_reason(theirs.state_reason());
  ours.set_state_version(theirs.state_version());
}

void TakeKeys(const v1::Deletion& deletion, std::vector<PageKey>& keys) {
  for (size_t at = 0; at + sizeof(PageKey) <= deletion.keys().size(); at += sizeof(PageKey)) {
    std::memcpy(keys.emplace_back().bytes.data(), deletion.keys().data() + at, sizeof(PageKey));
  }
}

void DropForgotten(v1::KeyspaceRecord& record) {
  const auto& forgotten = record.forgotten_deletions();
  auto& listed = *record.mutable_deletions();
  const auto gone = [&](const v1::Deletion& deletion) {
    const auto found = forgotten.find(deletion.node());
    return found != forgotten.end() && deletion.number() <= found->second;
  };
  listed.erase(std::remove_if(listed.begin(), listed.end(), gone), listed.end());
  std::sort(listed.begin(), listed.end(), [](const v1::Deletion& a, const v1::Deletion& b) {
    return std::make_tuple(a.node(), a.number()) < std::make_tuple(b.node(), b.number());
  });
}

void MergeDeletions(v1::KeyspaceRecord& ours, const v1::KeyspaceRecord& theirs,
                    KeyspaceChanges& changes) {
  const auto known = NewestDeletions(ours);
  const auto newest = NewestDeletions(theirs);
  for (const v1::Deletion& deletion : theirs.deletions()) {
    if (deletion.number() <= NumberOf(known, deletion.node())) continue;
    *ours.add_deletions() = deletion;
    TakeKeys(deletion, changes.deleted);
    changes.any = true;
  }
  for (const auto& [node, number] : theirs.forgotten_deletions()) {
    if (number > NumberOf(known, node)) changes.all_deleted = true;
    uint64_t& forgotten = (*ours.mutable_forgotten_deletions())[node];
    if (number > forgotten) changes.any = true;
    forgotten = std::max(forgotten, number);
  }
  for (const auto& [node, number] : known) {
    if (number > NumberOf(newest, node)) changes.theirs_behind = true;
  }
  for (const auto& [node, number] : ours.forgotten_deletions()) {
    const auto found = theirs.forgotten_deletions().find(node);
    if (found == theirs.forgotten_deletions().end() || found->second < number) {
      changes.theirs_behind = true;
    }
  }
  DropForgotten(ours);
}

}  // namespace

KeyspaceChanges MergeKeyspace(v1::KeyspaceRecord& ours, const v1::KeyspaceRecord& theirs) {
  KeyspaceChanges changes;
  if (theirs.generation() > ours.generation()) {
    ours.set_generation(theirs.generation());
    changes.generation = true;
    changes.any = true;
  } else if (theirs.generation() < ours.generation()) {
    changes.theirs_behind = true;
  }
  // One knows it, the other does not yet.
  if (theirs.tenant() > ours.tenant()) {
    ours.set_tenant(theirs.tenant());
    changes.any = true;
  } else if (theirs.tenant() < ours.tenant()) {
    changes.theirs_behind = true;
  }
  if (theirs.last_used_unix_s() > ours.last_used_unix_s()) {
    ours.set_last_used_unix_s(theirs.last_used_unix_s());
    changes.any = true;
  }
  MergeState(ours, theirs, changes);
  MergeDeletions(ours, theirs, changes);
  return changes;
}

absl::Status CheckRecord(const v1::KeyspaceRecord& record) {
  constexpr size_t kFieldsMax = 64;
  constexpr size_t kTextBytesMax = 1024;
  const auto refuse = [](const char* field) {
    return absl::InvalidArgumentError(std::string("the keyspace's record has an impossible ") +
                                      field);
  };
  if (record.generation() == 0) return refuse("generation");
  if (static_cast<size_t>(record.fields_size()) > kFieldsMax) return refuse("number of fields");
  for (const auto& [name, value] : record.fields()) {
    if (name.size() > kTextBytesMax || value.size() > kTextBytesMax) return refuse("field");
  }
  if (record.tenant().size() > kTextBytesMax || record.state_who().size() > kTextBytesMax ||
      record.state_reason().size() > kTextBytesMax) {
    return refuse("tenant or state");
  }
  if (static_cast<size_t>(record.forgotten_deletions_size()) > kDeletionNodesMax) {
    return refuse("number of nodes that deleted");
  }
  for (const auto& [node, number] : record.forgotten_deletions()) {
    if (node.empty() || node.size() > kNodeIdBytesMax || number == UINT64_MAX) {
      return refuse("forgotten deletion");
    }
  }
  for (const v1::Deletion& deletion : record.deletions()) {
    if (deletion.node().empty() || deletion.node().size() > kNodeIdBytesMax ||
        deletion.number() == 0 || deletion.number() == UINT64_MAX ||
        deletion.keys().size() % sizeof(PageKey) != 0) {
      return refuse("deletion");
    }
  }
  return absl::OkStatus();
}

bool ForgetDeletions(v1::KeyspaceRecord& record, size_t keys_max) {
  struct Listed {
    size_t bytes = 0;
    std::deque<const v1::Deletion*> oldest_first;
  };
  DropForgotten(record);  // also sorts each node's deletions by number
  std::map<std::string, Listed> by_node;
  size_t keys = 0;
  size_t bytes = 0;
  for (const v1::Deletion& deletion : record.deletions()) {
    Listed& listed = by_node[deletion.node()];
    listed.oldest_first.push_back(&deletion);
    listed.bytes += deletion.ByteSizeLong();
    keys += deletion.keys().size() / sizeof(PageKey);
    bytes += deletion.ByteSizeLong();
  }
  std::set<std::pair<size_t, std::string>> most;  // nodes by the bytes of their deletions
  for (const auto& [node, listed] : by_node) most.emplace(listed.bytes, node);
  bool forgot = false;
  while ((keys > keys_max || bytes > kDeletionBytesMax) && !most.empty()) {
    const std::string node = most.rbegin()->second;
    most.erase(std::prev(most.end()));
    Listed& listed = by_node[node];
    const v1::Deletion& oldest = *listed.oldest_first.front();
    listed.oldest_first.pop_front();
    listed.bytes -= oldest.ByteSizeLong();
    keys -= oldest.keys().size() / sizeof(PageKey);
    bytes -= oldest.ByteSizeLong();
    (*record.mutable_forgotten_deletions())[node] = oldest.number();
    forgot = true;
    if (!listed.oldest_first.empty()) most.emplace(listed.bytes, node);
  }
  if (forgot) DropForgotten(record);
  return forgot;
}

void AddDeletion(v1::KeyspaceRecord& record, const std::string& node,
                 const std::vector<PageKey>& keys, size_t keys_max) {
  const uint64_t number = NumberOf(NewestDeletions(record), node) + 1;
  v1::Deletion& added = *record.add_deletions();
  added.set_node(node);
  added.set_number(number);
  for (const PageKey& key : keys) added.mutable_keys()->append(key.view());
  ForgetDeletions(record, keys_max);
}

}  // namespace crumb::server
