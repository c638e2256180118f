// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/worker/keyspace_binder.h"
#include "client/worker/lead_token.h"
#include "client/worker/page_intake.h"
#include "client/worker/page_pool.h"
#include "client/worker/page_table.h"
#include "client/worker/prefix_finder.h"
#include "client/worker/prompt_key_cache.h"
#include "client/worker/publisher.h"
#include "client/worker/quality_watch.h"
#include "client/worker/segment_rule.h"
#include "client/worker/sequence_start.h"
#include "client/worker/shared_pages.h"
#include "client/worker/worker_tally.h"
#include "crumb/client.h"
#include "crumb/counters.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// A SequenceStart, and the token for the ranks that follow.
struct LedStart {
  SequenceStart start;
  std::string token;
};

// SequenceStarter is the core that CPU and GPU workers have in common. It determines the state with
// which a sequence begins: the keyspace (KeyspaceBinder), the page keys (PromptKeyCache) and the
// longest cached prefix (PrefixFinder), for a rank alone or in an engine. It owns the parts that
// all sequences of a worker use, the publisher among them. See Worker for the contract of Begin,
// Lead and Follow. Thread-safe.
//
// Begin:   bind keyspace -> known keys -> pages of live sequences -> Acquire -> hash the rest
// Lead:    the same, whole pages only, and a token with keyspace, tiers and lease
// Follow:  decode the token -> join the leader's lease, or acquire the same pages alone
//
// A sequence waits for crumbd's opening of the keyspace for its deadline, but at least 50 ms.
// Members are ordered so that the publisher's thread, which uses the others, ends first.
class SequenceStarter {
 public:
  // `options` and `client` are borrowed; `client` may be null. `reader` copies pages to staging
  // memory. `intake` may be null, which means that pages are read where crumbd has them. `shared`
  // may be null, which means that pages are not committed in place. kInvalidArgument: an option is
  // wrong.
  static absl::StatusOr<std::unique_ptr<SequenceStarter>> Create(const WorkerOptions& options,
                                                                 Client* client, PageReader& reader,
                                                                 PageIntake* intake,
                                                                 SharedPages* shared);

  // The functions of Worker. kInvalidArgument: there are no tokens, or the leader's token is of
  // another worker or of another prompt; kDataLoss, kFailedPrecondition (Follow): the token is
  // damaged or of another version; kAborted (Follow): this rank cannot have all of the leader's
  // pages. A failure of crumbd is no error but a shorter prefix.
  absl::StatusOr<SequenceStart> Begin(std::span<const int32_t> tokens,
                                      const SequenceOptions& options);
  absl::StatusOr<LedStart> Lead(std::span<const int32_t> tokens, const SequenceOptions& options);
  absl::StatusOr<SequenceStart> Follow(std::string_view token, std::span<const int32_t> tokens,
                                       const SequenceOptions& options);

  absl::Status WaitPublished(Duration timeout);
  WorkerCounters counters() const { return tally_.Read(); }

  // The parts that all sequences of the worker use.
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

  SequenceStarter(const WorkerOptions& options, Client* client, PageReader& reader,
                  PageIntake* intake, SharedPages* shared);
  // Returns a start with the keys that the prompt cache knows, and counts the prompt.
  SequenceStart StartOf(Binding keyspace, std::span<const int32_t> tokens,
                        const SequenceOptions& options);
  // Adds the prompt to the cache and, with `reports`, reports its hits to crumbd.
  void Conclude(const SequenceStart& start, const SequenceOptions& options, bool reports);
  // Handles the alarm of the quality watch: new sequences store BF16.
  void NoteBadQuality(double error);

  const WorkerOptions& options_;
  const SegmentRule rule_;
  Client* const client_;
  PagePool pool_;
  PageTable table_;
  PromptKeyCache prompt_key_cache_;
  WorkerTally tally_;
  QualityWatch watch_;
  const std::unique_ptr<PrefixFinder> finder_;
  std::unique_ptr<PagePublisher> null_publisher_;
  std::unique_ptr<KeyspaceBinder> binder_;  // not null after Create

  std::unique_ptr<Publisher> publisher_;  // null without client; its thread uses everything above
};

}  // namespace crumb::client
