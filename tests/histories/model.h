// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/fragment_header.h"
#include "tests/histories/disk.h"

namespace crumb::histories {

// Tenant t has the keyspaces 2t and 2t + 1.
inline constexpr int kTenants = 3;
inline constexpr int kKeyspaces = 2 * kTenants;
// Page i of a keyspace is page i % kSequencePages of sequence i / kSequencePages.
inline constexpr int kPages = 18;
inline constexpr int kSequencePages = 6;
// Keys kPages to 2 kPages - 1 of a keyspace are those of a keyspace of the next tenant: a tenant
// may name and publish them, and must not meet the other's pages.
inline constexpr int kKeys = 2 * kPages;

inline constexpr int kLayers = 2;
inline constexpr int kHeads = 2;
inline constexpr uint32_t kTileBytes = 9216;  // head_dim 256 in groups of 128
inline constexpr TileRange kAllTiles = {{0, kLayers}, {0, kHeads}};

inline int TenantOf(int keyspace) { return keyspace / 2; }

// The events of a history as workers know them: which contents were committed as which page,
// which commits were acknowledged, deleted or dropped, and which were reported as durable.
// Every content has a number of its own, which its tiles begin with and all their bytes follow
// from. Events are ordered by ticks.
class Model {
 public:
  explicit Model(const Disk& disk) : disk_(disk) {}

  uint64_t Tick() { return ++tick_; }

  // Keyspaces get their ids when the first node opens them.
  void SetKeyspace(int keyspace, const KeyspaceId& id) { ids_[keyspace] = id; }
  const KeyspaceId& IdOf(int keyspace) const { return ids_.at(keyspace); }
  PageKey KeyOf(int keyspace, int key) const;
  // The page before it in its sequence; zeros for the first.
  PageKey ParentOf(int keyspace, int key) const;

  // The bytes that a worker writes. Invalid contents are damaged on purpose and never served.
  struct Content {
    int keyspace = 0;
    PageKey key;
    uint64_t generation = 0;
    TileRange range;
    bool valid = true;
  };
  uint64_t Add(const Content& content);
  const Content& at(uint64_t number) const { return contents_.at(number).content; }

  // A content's tiles and header. `damage` flips a bit of a tile after its sum was taken.
  std::vector<std::byte> FragmentOf(uint64_t number, bool damage) const;
  FragmentHeader HeaderOf(uint64_t number) const;

  // A commit, from its call to its response. `durable`: the store is to write it to disk.
  struct CommitId {
    uint64_t content = 0;
    size_t index = 0;
  };
  CommitId BeginCommit(uint64_t content, bool durable);
  void EndCommit(const CommitId& commit, bool stored);
  // The node died: no commit that was under way happens any more.
  void NodeDied();

  // A call of Delete for keys of a keyspace, until it is completed. Commits that begin meanwhile
  // may be deleted by it.
  struct DeleteId {
    uint64_t number = 0;
    std::vector<CommitId> commits;  // commits that ended before it began
  };
  DeleteId BeginDelete(int keyspace, const std::vector<PageKey>& keys);
  void EndDelete(const DeleteId& id, bool acknowledged);
  // A call of DropKeyspace, and the generation that its response names.
  void BeginDrop(int keyspace) { ++drops_under_way_[keyspace]; }
  void EndDrop(int keyspace, uint64_t generation);
  uint64_t acknowledged_generation(int keyspace) const;

  // Returns the commits that a Flush of this tenant must have made durable if it succeeds, from its
  // call to its response.
  std::vector<CommitId> BeginFlush(int tenant) const;
  void EndFlush(const std::vector<CommitId>& commits);
  // The tenant's Flush failed because pages were lost before they were written. Later calls of
  // Flush do not report these again.
  void LossReported(int tenant);
  // A session was notified that the page is durable.
  void Durable(const KeyspaceId& keyspace, const PageKey& key);
  // Pages that a node has to serve after a restart: acknowledged as durable, and neither deleted
  // nor dropped nor lost by the disk since.
  std::vector<Content> DurablePages() const;

  // The state that a reader's request finds; taken when the request begins.
  struct Since {
    uint64_t tick = 0;
    uint64_t generation = 0;
  };
  Since Begin(int keyspace) { return {Tick(), acknowledged_generation(keyspace)}; }
  // Fails unless `tile` is tile (layer, head) of a content of that page that may be served to a
  // request that began at `since`. Returns its number.
  uint64_t CheckTile(std::span<const std::byte> tile, int keyspace, const PageKey& key, int layer,
                     int head, const Since& since) const;
  // Fails unless the content may be served.
  void CheckContent(uint64_t number, int keyspace, const PageKey& key, const Since& since) const;
  // Fails if `memory`, which a process of the tenant can read, has a content of another tenant.
  void CheckMemory(std::span<const std::byte> memory, int tenant) const;

  size_t contents() const { return contents_.size(); }

 private:
  struct Commit {
    uint64_t ended = 0;    // 0: under way
    uint64_t deleted = 0;  // when a delete of it was acknowledged
    bool being_deleted = false;
    bool durable = false;   // the store is to write it
    bool stored = false;    // it was acknowledged
    bool promised = false;  // it was said to be durable
    uint64_t losses = 0;    // losses of the page on disk when it began
  };
  struct Entry {
    Content content;
    std::vector<Commit> commits;
  };

  bool MayBeServed(const Entry& entry, const Since& since) const;
  bool IsGone(const Entry& entry, const Commit& commit) const;
  Disk::PageName NameOf(const Content& content) const {
    return {IdOf(content.keyspace), content.key};
  }
  std::string Describe(uint64_t number) const;

  const Disk& disk_;
  uint64_t tick_ = 0;
  std::map<int, KeyspaceId> ids_;
  std::map<uint64_t, Entry> contents_;
  std::map<int, uint64_t> generations_;
  std::map<int, int> drops_under_way_;
  struct Deleting {
    int keyspace = 0;
    std::vector<PageKey> keys;
  };
  std::map<uint64_t, Deleting> deletes_under_way_;  // indexed by the tick at which they began
};

}  // namespace crumb::histories
