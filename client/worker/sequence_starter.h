// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/worker/in_place_committer.h"
#include "client/worker/keyspace_binder.h"
#include "client/worker/lead_token.h"
#include "client/worker/page_fetcher.h"
#include "client/worker/page_intake.h"
#include "client/worker/page_pool.h"
#include "client/worker/page_table.h"
#include "client/worker/prompt_key_cache.h"
#include "client/worker/publisher.h"
#include "client/worker/quality_watch.h"
#include "client/worker/segment_rule.h"
#include "client/worker/sequence_start.h"
#include "client/worker/worker_tally.h"
#include "crumb/client.h"
#include "crumb/counters.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// What a SequenceStart is made from with Lead.
struct LedStart {
  SequenceStart start;
  std::string token;
};

// Decides what a worker's sequences begin with: the keyspace, the page keys, the longest cached
// prefix, for one rank alone or led; and publishes pages. See Worker for the contract of Begin,
// Lead and Follow. Thread-safe.
class SequenceStarter {
 public:
  // Validates options. `options` and `client` are borrowed; `client` may be null. `reader` brings
  // pages to crumbd; `intake` may be null: pages are read where crumbd has them. So may `place`:
  // nobody else reads pages where they are made.
  static absl::StatusOr<std::unique_ptr<SequenceStarter>> Create(const WorkerOptions& options,
                                                                 Client* client, PageReader& reader,
                                                                 PageIntake* intake,
                                                                 InPlaceCommitter* place);

  absl::StatusOr<SequenceStart> Begin(std::span<const int32_t> tokens,
                                      const SequenceOptions& options);
  absl::StatusOr<LedStart> Lead(std::span<const int32_t> tokens, const SequenceOptions& options);
  absl::StatusOr<SequenceStart> Follow(std::string_view token, std::span<const int32_t> tokens,
                                       const SequenceOptions& options);

  absl::Status WaitPublished(Duration timeout);
  WorkerCounters counters() const { return tally_.Read(); }

  // What sequences share.
  const SegmentRule& rule() const { return rule_; }
  PagePool& pool() { return pool_; }
  PageTable& table() { return table_; }
  PagePublisher& publisher() {
    return publisher_ != nullptr ? static_cast<PagePublisher&>(*publisher_) : *null_publisher_;
  }
  QualityWatch& watch() { return watch_; }
  WorkerTally& tally() { return tally_; }

 private:
  using Binding = KeyspaceBinder::Binding;
  class Parts;

  SequenceStarter(const WorkerOptions& options, Client* client, PageReader& reader,
                  PageIntake* intake, InPlaceCommitter* place);
  SequenceStart StartOf(Binding keyspace, std::span<const int32_t> tokens,
                        const SequenceOptions& options);
  int HitPagesMax(size_t tokens, const SequenceOptions& options) const;
  void KeepPrompt(const SequenceStart& start, const SequenceOptions& options);
  void FindShared(SequenceStart& start, int pages_max) const;
  void CountShared(SequenceStart& start);
  int PartsMax() const;
  bool CanFetch(const SequenceStart& start) const;
  std::unique_ptr<PageIntake::Prefix> NewPrefix(const SequenceStart& start, int pages_max) const;
  void FetchRest(SequenceStart& start, int pages_max, Duration timeout);
  void Hash(SequenceStart& start, std::span<const int32_t> tokens, const SequenceOptions& options,
            size_t end) const;
  void HashRest(SequenceStart& start, std::span<const int32_t> tokens,
                const SequenceOptions& options) const;
  std::vector<Tier> FetchWhole(SequenceStart& start, int pages_max, Duration timeout);
  void JoinLease(SequenceStart& start, const LeadToken& token, Duration timeout);
  PageRequest RequestFor(const SequenceStart& start, int first, int end, int window_tokens,
                         Duration timeout) const;
  void NoteBadQuality(double error);
  void NoteFetched(SequenceStart& start, FetchedPages& fetched, std::span<const Tier> tiers,
                   PageIntake::Prefix* intake);
  void NoteUsed(const SequenceStart& start);
  void NoteFetchFailure(SequenceStart& start, const absl::Status& status);

  const WorkerOptions& options_;
  const SegmentRule rule_;
  Client* const client_;
  PageIntake* const intake_;
  PagePool pool_;
  PageTable table_;
  PromptKeyCache prompt_key_cache_;
  WorkerTally tally_;
  QualityWatch watch_;
  std::unique_ptr<PageFetcher> fetcher_;  // null without client
  std::unique_ptr<PagePublisher> null_publisher_;
  std::unique_ptr<KeyspaceBinder> binder_;  // not null once Create has returned

  std::unique_ptr<Publisher> publisher_;  // null without client; its thread uses all of the above
};

}  // namespace crumb::client
