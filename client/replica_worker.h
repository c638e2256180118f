// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/keyspace_binding.h"
#include "client/lead_token.h"
#include "client/page_fetcher.h"
#include "client/publisher.h"
#include "client/quality_watch.h"
#include "client/sequence_parts.h"
#include "client/three_segment_sequence.h"
#include "common/mutex.h"
#include "crumb/client.h"
#include "crumb/worker.h"

namespace crumb::client {

// See Worker for the contract.
class ReplicaWorker final : public Worker {
 public:
  // `client` is borrowed and may be null.
  // The keyspaces are for pages that stay in this process.
  ReplicaWorker(const WorkerOptions& options, Client* client, const KeyspaceId& private_keyspace,
                const KeyspaceId& private_bf16_keyspace);

  absl::StatusOr<std::unique_ptr<Sequence>> Begin(std::span<const int32_t> tokens,
                                                  const SequenceOptions& options) override;
  absl::StatusOr<LedSequence> Lead(std::span<const int32_t> tokens,
                                   const SequenceOptions& options) override;
  absl::StatusOr<std::unique_ptr<Sequence>> Follow(std::string_view token,
                                                   std::span<const int32_t> tokens,
                                                   const SequenceOptions& options) override;
  absl::Status WaitPublished(Duration timeout) override;
  const WorkerOptions& options() const override { return options_; }
  WorkerCounters counters() const override { return tally_.Read(); }

  // Makes the keyspace known to crumbd if it is there, so that the first Begin need not.
  void OpenKeyspaceAhead();

 private:
  using Binding = std::shared_ptr<const KeyspaceBinding>;

  SequenceParts Parts();
  Binding CurrentBinding(Duration timeout);
  bool Stale(const KeyspaceBinding& binding) const;
  absl::StatusOr<Binding> Bind(Duration timeout);
  absl::StatusOr<KeyspaceInfo> OpenKeyspace(kernels::PageFormat format, Duration timeout);
  SequenceStart StartOf(Binding keyspace, std::span<const int32_t> tokens,
                        const SequenceOptions& options);
  int HitPagesMax(size_t tokens, const SequenceOptions& options) const;
  const KeyspaceId& ModelOf(kernels::PageFormat format) const;
  void FindShared(SequenceStart& start, int pages_max) const;
  void CountShared(SequenceStart& start);
  void FetchRest(SequenceStart& start, int pages_max, Duration timeout);
  std::vector<Tier> FetchWhole(SequenceStart& start, int pages_max, Duration timeout);
  void JoinLease(SequenceStart& start, const LeadToken& token, Duration timeout);
  PageRequest RequestFor(const SequenceStart& start, int first, int end, Duration timeout) const;
  std::unique_ptr<Sequence> MakeSequence(const SequenceOptions& options, SequenceStart start);
  void NoteBadQuality(double error);
  void TellBadQuality();
  void NoteFetched(SequenceStart& start, const FetchedPages& fetched, std::span<const Tier> tiers);
  void NoteUsed(const SequenceStart& start);
  void NoteFetchFailure(SequenceStart& start, const absl::Status& status);

  const WorkerOptions options_;
  const SegmentRule rule_;
  Client* const client_;
  const Binding private_binding_;
  const Binding private_bf16_binding_;
  const CpuBackend backend_;
  PagePool pool_;
  PageTable table_;
  WorkerTally tally_;
  std::atomic<bool> rebind_{false};  // crumbd disagreed about the keyspace
  QualityWatch watch_;
  std::atomic<bool> binding_now_{false};  // a thread is asking crumbd for it
  std::unique_ptr<PageFetcher> fetcher_;  // null without client
  std::unique_ptr<PageSink> null_sink_;

  Mutex mutex_;
  Binding binding_ ABSL_GUARDED_BY(mutex_);
  std::string bad_quality_ ABSL_GUARDED_BY(mutex_);  // not empty: crumbd does not know it yet

  std::unique_ptr<Publisher> publisher_;  // null without client; its thread uses all of the above
};

}  // namespace crumb::client
