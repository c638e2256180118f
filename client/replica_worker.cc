// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/replica_worker.h"

#include <algorithm>
#include <utility>

#include "client/null_sink.h"
#include "client/worker_keyspace.h"
#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<Worker>> Worker::Open(const WorkerOptions& options, Client* client) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace,
                         PrivateKeyspace(options, options.history_format));
  return std::make_unique<ReplicaWorker>(options, client, keyspace);
}

ReplicaWorker::ReplicaWorker(const WorkerOptions& options, Client*,
                             const KeyspaceId& private_keyspace)
    : options_(options),
      rule_{.recent_tokens = options.recent_tokens, .prefill_block = options.prefill_block},
      private_keyspace_(std::make_shared<KeyspaceBinding>(
          KeyspaceBinding{.id = private_keyspace, .history_format = options.history_format})),
      backend_(options_),
      pool_(options.page_bytes_max),
      sink_(std::make_unique<NullSink>(tally_)) {}

SequenceParts ReplicaWorker::Parts() {
  return {.options = options_,
          .rule = rule_,
          .backend = backend_,
          .pool = pool_,
          .table = table_,
          .sink = *sink_,
          .tally = tally_};
}

// Pages of live sequences need nobody's leave.
void ReplicaWorker::FindShared(SequenceStart& start, int pages_max) {
  while (static_cast<int>(start.pages.size()) < pages_max) {
    std::shared_ptr<const Page> page = table_.Find(start.prompt_keys[start.pages.size()]);
    if (page == nullptr) break;
    start.pages.push_back(std::move(page));
  }
  start.stats.hit_tokens_worker = static_cast<int>(start.pages.size()) * kPageTokens;
  tally_.hit_tokens_worker.Add(start.stats.hit_tokens_worker);
}

absl::StatusOr<std::unique_ptr<Sequence>> ReplicaWorker::Begin(std::span<const int32_t> tokens,
                                                               const SequenceOptions& options) {
  if (tokens.empty()) return absl::InvalidArgumentError("Begin without tokens");
  const std::shared_ptr<const KeyspaceBinding> keyspace = private_keyspace_;
  SequenceStart start{.keyspace = keyspace,
                      .prompt = {tokens.begin(), tokens.end()},
                      .prompt_keys = {},
                      .chain = PageKeyChain(keyspace->id),
                      .pages = {},
                      .stats = {}};
  for (size_t page = 0; (page + 1) * kPageTokens <= tokens.size(); ++page) {
    const Digest extra = page < options.extra.size() ? options.extra[page] : Digest{};
    start.prompt_keys.push_back(
        start.chain.Next(tokens.subspan(page * kPageTokens, kPageTokens), extra));
  }
  tally_.sequences.Add();
  tally_.prompt_tokens.Add(tokens.size());
  FindShared(start, rule_.HitTokensMax(static_cast<int>(tokens.size())) / kPageTokens);
  return std::make_unique<ThreeSegmentSequence>(Parts(), options, std::move(start));
}

absl::Status ReplicaWorker::WaitPublished(Duration) { return absl::OkStatus(); }

}  // namespace crumb::client
