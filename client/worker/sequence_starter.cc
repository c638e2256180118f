// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/sequence_starter.h"

#include <algorithm>
#include <utility>

#include "client/worker/page_publisher.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {

namespace {

// Minimum timeout for opening the keyspace, for a sequence that waits for nothing; crumbd responds
// from memory.
constexpr Duration kBindTimeoutMin = std::chrono::milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<SequenceStarter>> SequenceStarter::Create(
    const WorkerOptions& options, Client* client, PageReader& reader, PageIntake* intake,
    SharedPages* shared) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<SequenceStarter> starter(
      new SequenceStarter(options, client, reader, intake, shared));
  // The publisher exists before the binder, which may run tasks on its thread.
  CRUMB_ASSIGN_OR_RETURN(
      starter->binder_,
      KeyspaceBinder::Create(options, client, [starter = starter.get()](auto task) {
        if (starter->publisher_ != nullptr) {
          starter->publisher_->RunSoon(std::move(task));
        }
      }));
  return starter;
}

SequenceStarter::SequenceStarter(const WorkerOptions& options, Client* client, PageReader& reader,
                                 PageIntake* intake, SharedPages* shared)
    : options_(options),
      rule_{.recent_tokens = options.recent_tokens, .prefill_block = options.prefill_block},
      client_(client),
      pool_(options.page_bytes_max),
      prompt_key_cache_(options.prompt_key_cache_tokens),
      watch_(options_, [this](double error) { NoteBadQuality(error); }),
      finder_(std::make_unique<PrefixFinder>(options_, client_, intake, shared, pool_, table_,
                                             tally_, [this] { binder_->Invalidate(); })),
      null_publisher_(std::make_unique<NullPublisher>(tally_)) {
  if (client_ == nullptr) return;
  publisher_ = std::make_unique<Publisher>(options_, *client_, reader, shared, tally_,
                                           [this] { binder_->Invalidate(); });
}

// Makes new sequences store BF16, once the quality watch has found the error of INT2 pages too
// large.
void SequenceStarter::NoteBadQuality(double error) {
  tally_.quality_alarms.Add();
  binder_->GiveUpInt2(
      fmt::format("mean attention error {:.3f} over {} windows is above the bound {:.3f}", error,
                  options_.watch_windows, watch_.bound()));
}

SequenceStart SequenceStarter::StartOf(Binding keyspace, std::span<const int32_t> tokens,
                                       const SequenceOptions& options) {
  PromptKeys keys = prompt_key_cache_.Find(keyspace->id, tokens, options.extra);
  SequenceStart start{.keyspace = std::move(keyspace),
                      .prompt = std::move(keys.tokens),
                      .prompt_keys = std::move(keys.keys),
                      .chain = keys.chain,
                      .pages = {},
                      .lease = nullptr,
                      .lease_id = 0,
                      .stats = {}};
  start.pages.reserve(tokens.size() / kPageTokens);
  tally_.sequences.Add();
  tally_.prompt_tokens.Add(tokens.size());
  tally_.prompt_tokens_known.Add(start.prompt_keys.size() * kPageTokens);
  return start;
}

// Adds the prompt to the key cache, which nothing that the device could be waiting for needs, and
// reports the used tokens for crumbd's metrics. Followers do not report, so that an engine counts
// once.
void SequenceStarter::Conclude(const SequenceStart& start, const SequenceOptions& options,
                               bool reports) {
  const int fetched = start.stats.hit_tokens() - start.stats.hit_tokens_worker;
  if (reports && fetched > 0) {
    const auto tokens = static_cast<uint64_t>(fetched);
    client_->Count({.used_tokens = tokens, .prefill_tokens_avoided = tokens});
  }
  prompt_key_cache_.Keep(start.keyspace->id, start.prompt, options.extra, start.prompt_keys);
}

absl::StatusOr<SequenceStart> SequenceStarter::Begin(std::span<const int32_t> tokens,
                                                     const SequenceOptions& options) {
  if (tokens.empty()) return absl::InvalidArgumentError("Begin without tokens");
  const Duration timeout = options.deadline.value_or(options_.begin_deadline);
  SequenceStart start =
      StartOf(binder_->Current(std::max(timeout, kBindTimeoutMin)), tokens, options);
  finder_->Find(start, tokens, options);
  Conclude(start, options, /*reports=*/true);
  return start;
}

absl::StatusOr<LedStart> SequenceStarter::Lead(std::span<const int32_t> tokens,
                                               const SequenceOptions& options) {
  if (tokens.empty()) return absl::InvalidArgumentError("Lead without tokens");
  const Duration timeout = options.deadline.value_or(options_.begin_deadline);
  SequenceStart start =
      StartOf(binder_->Current(std::max(timeout, kBindTimeoutMin)), tokens, options);
  finder_->HashRest(start, tokens, options);
  LeadToken token;
  token.model = binder_->PrivateId(start.keyspace->history_format);
  token.keyspace = *start.keyspace;
  token.tiers = finder_->FindWhole(start, finder_->HitPagesMax(tokens.size(), options), timeout);
  token.lease = start.lease_id;
  if (!start.pages.empty()) token.last_key = start.prompt_keys[start.pages.size() - 1];
  Conclude(start, options, /*reports=*/true);
  return LedStart{std::move(start), EncodeLeadToken(token)};
}

absl::StatusOr<SequenceStart> SequenceStarter::Follow(std::string_view bytes,
                                                      std::span<const int32_t> tokens,
                                                      const SequenceOptions& options) {
  if (tokens.empty()) return absl::InvalidArgumentError("Follow without tokens");
  CRUMB_ASSIGN_OR_RETURN(const LeadToken token, DecodeLeadToken(bytes));
  if (token.model != binder_->PrivateId(token.keyspace.history_format)) {
    return absl::InvalidArgumentError("the token is of a worker with other WorkerOptions");
  }
  const Duration timeout = options.deadline.value_or(options_.begin_deadline);
  SequenceStart start =
      StartOf(std::make_shared<const KeyspaceBinding>(token.keyspace), tokens, options);
  finder_->HashRest(start, tokens, options);
  const size_t pages = token.tiers.size();
  if (pages >
          static_cast<size_t>(rule_.HitTokensMax(static_cast<int>(tokens.size()))) / kPageTokens ||
      (pages > 0 && start.prompt_keys[pages - 1] != token.last_key)) {
    return absl::InvalidArgumentError("the token is of another prompt");
  }
  finder_->FindLed(start, token, timeout);
  if (start.pages.size() < pages) {
    return absl::AbortedError("this rank has " + std::to_string(start.pages.size() * kPageTokens) +
                              " of the cached tokens, " + start.stats.miss_reason +
                              ": lead again with that cached_tokens_max");
  }
  start.stats.miss_reason.clear();
  Conclude(start, options, /*reports=*/false);
  return start;
}

absl::Status SequenceStarter::WaitPublished(Duration timeout) {
  return publisher_ == nullptr ? absl::OkStatus() : publisher_->WaitIdle(timeout);
}

}  // namespace crumb::client
