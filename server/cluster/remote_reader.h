// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/executor.h"
#include "common/fragment_header.h"
#include "common/holder_directory.h"
#include "common/mutex.h"
#include "common/page_key.h"
#include "server/cluster/cluster_metrics.h"
#include "server/cluster/peer_budget.h"
#include "server/cluster/peer_table.h"
#include "server/keyspaces/keyspace.h"
#include "storage/deadline_timer.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Pages that are on their way here, so that each is fetched once however many requests wait for
// it. Thread-safe.
class PageFlights {
 public:
  using Landed = std::function<void(bool arrived)>;

  // True: the caller brings the page and calls Land. False: another caller does already, and
  // `landed` will be called on its thread.
  bool Claim(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range, Landed landed);
  // Ends a flight and calls all that wait for it, on this thread and without a lock.
  void Land(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range, bool arrived);

 private:
  struct Name {
    KeyspaceId keyspace;
    PageKey key;
    TileRange range;

    friend bool operator==(const Name&, const Name&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const Name& name) {
      return H::combine(std::move(h), name.keyspace, name.key, name.range.layers.begin,
                        name.range.heads.begin);
    }
  };

  Mutex mutex_;
  absl::flat_hash_map<Name, std::vector<Landed>> waiting_ ABSL_GUARDED_BY(mutex_);
};

// Pages that this node lacks, in prefix order.
struct PullRequest {
  std::shared_ptr<Keyspace> keyspace;
  std::vector<PageKey> keys;
  uint32_t first_page = 0;  // position of keys[0] in its sequence
  PageKey run;              // begins the run of keys[0]; not needed where keys[0] does itself
  TileRange range;
  TimePoint deadline;
  bool everyone = false;  // requests go to every node, not only to homes
  // A caller waits for the response; else half of `pulls_max` is left to others.
  bool awaited = true;
};

// The outcome of a pull: the prefix that has come, and the reason for its end.
struct PullResult {
  size_t pages = 0;                            // leading keys that are in host memory now
  MissReason miss_reason = MissReason::kNone;  // why the next page is missing
};

// The tiers and nodes where pages were found.
struct FoundPages {
  std::vector<Tier> tiers;           // [leading keys] kRemote: on another node
  std::vector<std::string> nodes;    // ids
  std::vector<uint32_t> page_nodes;  // index into `nodes` of each page at kRemote, in order
  MissReason miss_reason = MissReason::kNone;  // why the next page is missing
};

// Pages that a node offered to this one. In no order; each for itself.
struct OfferedPages {
  std::shared_ptr<Peer> from;
  std::shared_ptr<Keyspace> keyspace;
  std::vector<PageKey> keys;
  std::vector<uint32_t> tile_bytes;  // tile size of each page
  TileRange range;
  transport::SessionToken session{};
  TimePoint deadline;
};

// The parts that a pull works with; all outlive it.
struct PullContext {
  storage::TieredStore& store;
  PeerTable& peers;
  PageFlights& flights;
  storage::DeadlineTimer& timer;
  Executor& steps;
  const Clock& clock;
  ClusterMetrics& metrics;
  size_t fetch_pages_max;
  // Called when a node has a newer generation of a keyspace than this one.
  std::function<void(const std::string& node)> newer_generation;
  // The holders of pages of which this node is the home. Null: it is the home of none.
  HolderDirectory* holders = nullptr;
  // A copy of another node's page has come here; `run` is its run's first page, zeros if that is
  // not known. Homes are notified.
  std::function<void(const FragmentHeader& header, const PageKey& run)> pulled = {};
};

// Reads pages from other nodes into host memory: docs/architecture.md, "Life of a peer read". One
// call to each home of the missing runs, in parallel, then fetches from several nodes at a time.
// Thread-safe; never blocks.
class RemoteReader {
 public:
  // At most `pulls_max` pulls and finds at a time, of them `per_tenant_max` for keyspaces of one
  // tenant. More fail at once with kBusy.
  RemoteReader(PullContext context, size_t pulls_max, size_t per_tenant_max = SIZE_MAX)
      : context_(std::move(context)), pulls_max_(pulls_max), tenants_(per_tenant_max) {}

  // Calls `done` once: when the prefix's end is known, at the latest at the deadline. On any
  // thread.
  void Pull(PullRequest request, std::function<void(PullResult)> done);

  // Finds the nodes that have the pages, with the requests of Pull, and brings no page. Calls
  // `done` once, likewise.
  void Find(PullRequest request, std::function<void(FoundPages)> done);

  // Fetches offered pages. `reasons[i]` says why keys[i] is missing; kNone if this node has it.
  using Taken = std::function<void(const std::vector<MissReason>& reasons)>;
  void Take(OfferedPages offered, Taken done);

  // Pulls and finds under way.
  size_t active() const { return active_.load(); }

 private:
  // A place among `pulls_max`; null: none is left, or none for this tenant.
  std::shared_ptr<const PartyBudget::Hold> Enter(const PullRequest& request);

  const PullContext context_;
  const size_t pulls_max_;
  std::atomic<size_t> active_{0};
  PartyBudget tenants_;
};

}  // namespace crumb::server
