// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "client/worker/lead_token.h"
#include "client/worker/page_fetcher.h"
#include "client/worker/page_intake.h"
#include "client/worker/page_pool.h"
#include "client/worker/page_table.h"
#include "client/worker/segment_rule.h"
#include "client/worker/sequence_start.h"
#include "client/worker/shared_pages.h"
#include "client/worker/worker_tally.h"
#include "crumb/client.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// PrefixFinder finds the cached prefix of a prompt: first in pages of the worker's live sequences,
// then in crumbd, whose pages it leases and brings to where attention reads them. It appends pages
// to SequenceStart::pages, hashes the keys that SequenceStart::prompt_keys lacks, and counts hits
// and misses. Thread-safe.
//
// A long prompt is acquired in parts: the pages whose keys are known, then the others in two parts
// (four if pages are copied to a device). While crumbd looks a part up, the keys of the next one
// are hashed; the next part is requested only if all of the part before was a hit. See
// docs/adr/0013.
//
// No error leaves the finder: a failed request ends the prefix, is counted as late or unavailable,
// and gives the miss its reason.
class PrefixFinder {
 public:
  // Everything is borrowed. `client` may be null: then only pages of live sequences are found.
  // `intake` may be null: then pages are read where crumbd has them. `shared` may be null, which
  // means no device pools. `stale` is called when crumbd's response shows that the keyspace binding
  // is stale.
  PrefixFinder(const WorkerOptions& options, Client* client, PageIntake* intake,
               SharedPages* shared, PagePool& pool, PageTable& table, WorkerTally& tally,
               std::function<void()> stale);

  // Finds the longest prefix, acquiring it in parts while it hashes the keys of further parts.
  void Find(SequenceStart& start, std::span<const int32_t> tokens, const SequenceOptions& options);
  // Finds the longest prefix, up to `pages_max` pages, that every rank of the engine can have.
  // Returns the tiers of its pages. REQUIRES: HashRest was called.
  std::vector<Tier> FindWhole(SequenceStart& start, int pages_max, Duration timeout);
  // Finds this rank's part of a leader's prefix, under the leader's lease if that still exists.
  // Finds fewer pages than the leader if this rank cannot have all. REQUIRES: HashRest was called.
  void FindLed(SequenceStart& start, const LeadToken& token, Duration timeout);

  // Hashes the prompt's remaining pages and keeps its tokens.
  void HashRest(SequenceStart& start, std::span<const int32_t> tokens,
                const SequenceOptions& options) const;
  // Returns the number of pages of a prompt that may come from the cache.
  int HitPagesMax(size_t tokens, const SequenceOptions& options) const;

 private:
  // The state of one Find: the parts of the prefix, and the request in flight.
  class Parts;

  // Adds pages of live sequences, of the generation in which the sequence begins.
  void FindShared(SequenceStart& start, int pages_max) const;
  // Counts the pages that start.pages has as hits in this worker.
  void CountShared(SequenceStart& start);
  // Returns whether pages can be requested: there is a crumbd, and it knows the keyspace.
  bool CanFetch(const SequenceStart& start) const;
  // Returns the intake of a prefix; null if pages are read where crumbd has them.
  std::unique_ptr<PageIntake::Prefix> NewPrefix(const SequenceStart& start, int pages_max) const;
  // Acquires the pages behind those that the sequence has, in one request.
  void FetchRest(SequenceStart& start, int pages_max, Duration timeout);
  // Hashes the keys of further pages, up to page `end`.
  void Hash(SequenceStart& start, std::span<const int32_t> tokens, const SequenceOptions& options,
            size_t end) const;
  // Acquires this rank's part under the leader's lease, unless another crumbd runs since.
  void JoinLease(SequenceStart& start, const LeadToken& token, Duration timeout);
  // Adds fetched pages to the prefix and counts hits and the miss behind them; tiers[i] is the tier
  // of the i-th fetched page.
  void NoteFetched(SequenceStart& start, FetchedPages& fetched, std::span<const Tier> tiers,
                   PageIntake::Prefix* intake);
  // Counts a failed request, which ends the prefix.
  void NoteFetchFailure(SequenceStart& start, const absl::Status& status);

  const WorkerOptions& options_;
  const SegmentRule rule_;
  Client* const client_;
  PageIntake* const intake_;
  const int parts_max_;
  PageTable& table_;
  WorkerTally& tally_;
  const std::function<void()> stale_;
  std::unique_ptr<PageFetcher> fetcher_;  // null without client
};

}  // namespace crumb::client
