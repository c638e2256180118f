// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/page_key.h"

namespace crumb {

// The nodes that hold the pages of which this node is the home. With it a home refers a node that
// wants them to a holder, instead of keeping a copy and serving every reader itself.
//
//   node A: PeerPush(keys) -----> home: Note(A, keys)
//   node B: PeerAcquire(keys) --> home: Refer(keys) = {A}; B reads from A, offers the keys
//   node C: PeerAcquire(keys) --> home: Refer(keys) = {B, A}: B was referred to less often
//
// The unit is a page, not a run: all prompts share the run that begins with the system prompt and
// differ inside it. An entry is a hint. A holder may have evicted the page; the reader then
// says so (Forget) and is referred elsewhere. A hint never makes a page visible: holders check
// generation, deletion and rights themselves.
//
// Room: `pages_max` pages. If they are used up, pages go in this order: first those that a node
// noted that has left the view since; then the least recently used page of the tenant with most
// pages of the node with most pages. So neither a node nor a tenant that floods the directory takes
// more than its even part from the others.
//
// Thread-safe. Never blocks; every call is bounded by its keys and kHoldersMax.
class HolderDirectory {
 public:
  // Holders that are remembered of a page. More are not needed to spread readers: every reader
  // becomes a holder, and the one that was referred to most often makes room for it.
  static constexpr size_t kHoldersMax = 8;
  // Separate ranges of tiles that are remembered of a holder; ranges that touch are one.
  static constexpr size_t kRangesMax = 8;
  // Nodes that a referral names.
  static constexpr size_t kReferralNodesMax = 3;

  explicit HolderDirectory(size_t pages_max) : pages_max_(pages_max) {}

  // An offer: `node` holds the tiles `range` of `keys`.
  struct Offer {
    std::string node;
    KeyspaceId keyspace;
    std::string tenant;  // tenant of the keyspace
    uint64_t generation = 0;
    TileRange range;
    std::vector<PageKey> keys;
    std::vector<uint32_t> tile_bytes;   // tile size of each key's page
    std::array<uint8_t, 16> session{};  // entitles this node to fetch from `node`
  };
  void Note(const Offer& offer);

  // A request for the leading pages of one run.
  struct Query {
    std::string requester;  // node that sent the request; never referred to itself
    KeyspaceId keyspace;
    uint64_t generation = 0;
    TileRange range;
    std::span<const PageKey> keys;  // only the first kRunPages are looked at
    size_t own_pages = 0;           // leading pages that this node could serve itself
    bool counted = true;            // false: the caller reads nothing, it only wants to know
  };
  // Whether Refer could return anything: any node is known to hold any of the pages.
  bool Knows(const Query& query) const;
  struct Referral {
    size_t pages = 0;                // leading pages that each of the nodes should have
    std::vector<std::string> nodes;  // kReferralNodesMax at most, the best first
  };
  // Chooses who serves the run: the holders of the deepest page that anyone has, those with the
  // fewest referrals for it first, then those with the fewest in all. This node counts as a holder
  // of its own pages. None: it serves its own pages. Counts the choice as a referral.
  std::optional<Referral> Refer(const Query& query);

  // A holder of a part of a page.
  struct Part {
    std::string node;
    std::array<uint8_t, 16> session{};
    TileRange range;
    uint32_t tile_bytes = 0;
  };
  // The parts of a page that several nodes hold and none of them has all of: a reader of the whole
  // page could be referred to no one. Empty if one holder has all tiles that the others have.
  std::vector<Part> PartsOf(const KeyspaceId& keyspace, uint64_t generation, const PageKey& key);

  // `node` was found not to hold these pages.
  void Forget(const std::string& node, const KeyspaceId& keyspace, std::span<const PageKey> keys);
  // These pages are deleted.
  void ForgetPages(const KeyspaceId& keyspace, std::span<const PageKey> keys);
  // `node` has left the view, or its process is another one.
  void ForgetNode(const std::string& node);

  size_t pages() const;
  // Pages that were forgotten for want of room.
  uint64_t evicted() const;

 private:
  using Ranges = std::vector<TileRange>;
  // Names a node from when it is first noted until it is forgotten; never used again.
  using Slot = uint32_t;

  struct Name {
    KeyspaceId keyspace;
    PageKey key;

    friend bool operator==(const Name&, const Name&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const Name& name) {
      return H::combine(std::move(h), name.keyspace, name.key);
    }
  };
  struct Holder {
    Slot slot = 0;
    uint32_t referrals = 0;
    uint32_t tile_bytes = 0;
    Ranges ranges;
  };
  // Pages of one tenant that one node was the first to note; the least recently used at the end.
  struct Group {
    Slot slot = 0;
    std::string tenant;
    std::list<const Name*> order;
  };
  struct Entry {
    uint64_t generation = 0;
    uint32_t own_referrals = 0;  // how often this node served the page itself
    Group* group = nullptr;
    std::list<const Name*>::iterator place;
    std::vector<Holder> holders;
  };
  struct Node {
    std::string id;
    uint64_t referrals = 0;
    std::array<uint8_t, 16> session{};
  };
  struct Owner {
    size_t pages = 0;
    std::map<std::string, Group> groups;  // indexed by tenant
  };

  Slot SlotOf(const std::string& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteLocked(const Offer& offer, size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null: the page is not known in this generation.
  Entry* FindEntry(const KeyspaceId& keyspace, uint64_t generation, const PageKey& key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<Holder*> HoldersOf(Entry& entry, const std::optional<Slot>& requester,
                                 const TileRange& range) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountReferral(const Query& query, size_t pages, const std::optional<Slot>& chosen)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Touch(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Erase(const Name& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EvictOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t pages_max_;
  mutable Mutex mutex_;
  Slot last_slot_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, Slot> slots_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<Slot, Node> nodes_ ABSL_GUARDED_BY(mutex_);  // those of the view
  absl::node_hash_map<Name, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::map<Slot, Owner> owners_ ABSL_GUARDED_BY(mutex_);
  uint64_t own_referrals_ ABSL_GUARDED_BY(mutex_) = 0;  // pages that this node served itself
  uint64_t evicted_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb
