// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/replica_worker.h"

#include <algorithm>
#include <utility>

#include "client/null_sink.h"
#include "client/worker_keyspace.h"
#include "common/logging.h"
#include "common/placement.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {

using kernels::PageFormat;

namespace {

// crumbd writes a record of a keyspace it sees for the first time.
constexpr Duration kOpenTimeout = std::chrono::seconds(2);
// For a sequence that waits for nothing: crumbd answers from memory.
constexpr Duration kBindTimeoutMin = std::chrono::milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Open(const WorkerOptions& options, Client* client) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId keyspace,
                         PrivateKeyspace(options, options.history_format));
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId bf16, PrivateKeyspace(options, PageFormat::kBf16));
  auto worker = std::make_unique<ReplicaWorker>(options, client, keyspace, bf16);
  worker->OpenKeyspaceAhead();
  return worker;
}

ReplicaWorker::ReplicaWorker(const WorkerOptions& options, Client* client,
                             const KeyspaceId& private_keyspace,
                             const KeyspaceId& private_bf16_keyspace)
    : options_(options),
      rule_{.recent_tokens = options.recent_tokens, .prefill_block = options.prefill_block},
      client_(client),
      private_binding_(std::make_shared<KeyspaceBinding>(
          KeyspaceBinding{.id = private_keyspace,
                          .watched = private_keyspace,
                          .history_format = options.history_format})),
      private_bf16_binding_(
          std::make_shared<KeyspaceBinding>(KeyspaceBinding{.id = private_bf16_keyspace,
                                                            .watched = private_keyspace,
                                                            .history_format = PageFormat::kBf16})),
      backend_(options_),
      pool_(options.page_bytes_max),
      watch_(options_, [this](double error) { NoteBadQuality(error); }),
      null_sink_(std::make_unique<NullSink>(tally_)),
      binding_(private_binding_) {
  if (client_ == nullptr) return;
  fetcher_ = std::make_unique<PageFetcher>(options_, *client_, pool_);
  publisher_ =
      std::make_unique<Publisher>(options_, *client_, tally_, [this] { rebind_.store(true); });
}

SequenceParts ReplicaWorker::Parts() {
  PageSink& sink = publisher_ != nullptr ? static_cast<PageSink&>(*publisher_) : *null_sink_;
  return {.options = options_,
          .rule = rule_,
          .backend = backend_,
          .pool = pool_,
          .table = table_,
          .sink = sink,
          .watch = watch_,
          .tally = tally_};
}

bool ReplicaWorker::Stale(const KeyspaceBinding& binding) const {
  if (!binding.known_to_crumbd || binding.epoch != client_->epoch() || rebind_.load()) return true;
  if (options_.history_format != PageFormat::kInt2) return false;
  const bool int2_off = client_->StateOf(binding.watched) == KeyspaceState::kBf16;
  return int2_off != (binding.history_format == PageFormat::kBf16);
}

void ReplicaWorker::OpenKeyspaceAhead() {
  if (client_ != nullptr) CurrentBinding(kOpenTimeout);
}

// Sequences keep the keyspace they began with; a new one asks again when crumbd was restarted,
// changed the keyspace's state or generation, or was not there before. One thread asks; the others
// go on with what is known.
ReplicaWorker::Binding ReplicaWorker::CurrentBinding(Duration timeout) {
  Binding binding;
  bool bad_quality;
  {
    MutexLock lock(&mutex_);
    binding = binding_;
    bad_quality = !bad_quality_.empty();
  }
  if (bad_quality) {
    if (publisher_ != nullptr) publisher_->RunSoon([this] { TellBadQuality(); });
    return private_bf16_binding_;
  }
  if (client_ == nullptr) return private_binding_;
  if (!client_->connected() || !Stale(*binding) || binding_now_.exchange(true)) return binding;
  rebind_.store(false);
  absl::StatusOr<Binding> bound = Bind(timeout);
  if (bound.ok()) {
    binding = *std::move(bound);
    MutexLock lock(&mutex_);
    binding_ = binding;
  } else {
    LogWarning("keyspace of {} could not be opened: {}", options_.model, bound.status().ToString());
  }
  binding_now_.store(false);
  return binding;
}

absl::StatusOr<KeyspaceInfo> ReplicaWorker::OpenKeyspace(PageFormat format, Duration timeout) {
  KeyspaceSpec spec;
  CRUMB_ASSIGN_OR_RETURN(spec.fields, KeyspaceFields(options_, format));
  spec.layers = options_.layers;
  spec.kv_heads = options_.kv_heads;
  spec.head_dim = options_.head_dim;
  spec.group_size = options_.group_size;
  spec.tenant = options_.tenant;
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceInfo info, client_->OpenKeyspace(spec, timeout));
  const kernels::TileShape shape = options_.tile_shape();
  if (info.bf16_tile_bytes != shape.bf16_bytes() || info.int2_tile_bytes != shape.int2_bytes()) {
    return absl::FailedPreconditionError("crumbd counts other tile sizes");
  }
  return info;
}

absl::StatusOr<ReplicaWorker::Binding> ReplicaWorker::Bind(Duration timeout) {
  PageFormat format = options_.history_format;
  CRUMB_ASSIGN_OR_RETURN(KeyspaceInfo info, OpenKeyspace(format, timeout));
  const KeyspaceId watched = info.id;
  if (format == PageFormat::kInt2 && info.state == KeyspaceState::kBf16) {
    LogWarning("INT2 pages of {} are switched off: new sequences use BF16", options_.model);
    format = PageFormat::kBf16;
    CRUMB_ASSIGN_OR_RETURN(info, OpenKeyspace(format, timeout));
  }
  return std::make_shared<const KeyspaceBinding>(KeyspaceBinding{.id = info.id,
                                                                 .watched = watched,
                                                                 .history_format = format,
                                                                 .known_to_crumbd = true,
                                                                 .generation = info.generation,
                                                                 .epoch = info.epoch});
}

// New sequences store BF16 from now on: until crumbd knows, by this process's own decision, then by
// the keyspace's state, which a command can set back.
void ReplicaWorker::NoteBadQuality(double error) {
  tally_.quality_alarms.Add();
  std::string reason =
      fmt::format("mean attention error {:.3f} over {} windows is above the bound {:.3f}", error,
                  options_.watch_windows, options_.watch_error_max);
  LogWarning("INT2 pages of {} are given up: {}", options_.model, reason);
  {
    MutexLock lock(&mutex_);
    bad_quality_ = std::move(reason);
  }
  if (publisher_ != nullptr) publisher_->RunSoon([this] { TellBadQuality(); });
}

void ReplicaWorker::TellBadQuality() {
  std::string reason;
  {
    MutexLock lock(&mutex_);
    reason = bad_quality_;
  }
  if (reason.empty() || !client_->connected()) return;
  const absl::StatusOr<KeyspaceInfo> keyspace = OpenKeyspace(PageFormat::kInt2, kOpenTimeout);
  absl::Status told = keyspace.status();
  if (told.ok()) {
    told = client_->SetKeyspaceState(keyspace->id, KeyspaceState::kBf16, "quality watch", reason);
  }
  if (!told.ok()) {
    LogWarning("crumbd was not told to give up INT2 pages of {}: {}", options_.model,
               told.ToString());
    return;
  }
  rebind_.store(true);
  MutexLock lock(&mutex_);
  bad_quality_.clear();
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

void ReplicaWorker::FetchRest(SequenceStart& start, int pages_max, Duration timeout) {
  const int first = static_cast<int>(start.pages.size());
  if (fetcher_ == nullptr || !start.keyspace->known_to_crumbd || first >= pages_max) return;
  const std::span<const PageKey> keys =
      std::span(start.prompt_keys).subspan(first, pages_max - first);
  const PageKey parent = first == 0 ? PageKey{} : start.prompt_keys[first - 1];
  const PageKey run = start.prompt_keys[first / kRunPages * kRunPages];
  const int window = static_cast<int>(start.prompt.size()) - pages_max * kPageTokens;
  const absl::StatusOr<FetchedPages> fetched =
      fetcher_->Fetch(*start.keyspace, first, parent, run, keys, window, timeout);
  if (fetched.ok()) {
    NoteFetched(start, *fetched);
  } else {
    NoteFetchFailure(start, fetched.status());
  }
}

void ReplicaWorker::NoteFetched(SequenceStart& start, const FetchedPages& fetched) {
  for (size_t i = 0; i < fetched.pages.size(); ++i) {
    start.pages.push_back(table_.Share(fetched.pages[i]));
    switch (fetched.tiers[i]) {
      case Tier::kSsd:
        start.stats.hit_tokens_ssd += kPageTokens;
        break;
      case Tier::kRemote:
        start.stats.hit_tokens_remote += kPageTokens;
        break;
      case Tier::kUnknown:
      case Tier::kDevice:
      case Tier::kHost:
        start.stats.hit_tokens_host += kPageTokens;
        break;
    }
  }
  start.stats.fetched_bytes += fetched.bytes;
  tally_.hit_tokens_host.Add(start.stats.hit_tokens_host);
  tally_.hit_tokens_ssd.Add(start.stats.hit_tokens_ssd);
  tally_.hit_tokens_remote.Add(start.stats.hit_tokens_remote);
  const uint64_t tokens = fetched.pages.size() * kPageTokens;
  if (tokens > 0) client_->Count({.used_tokens = tokens, .prefill_tokens_avoided = tokens});
  if (fetched.miss_reason == MissReason::kNone) return;
  start.stats.miss_reason = MissReasonName(fetched.miss_reason);
  if (fetched.miss_reason == MissReason::kCorrupt) tally_.verify_failures.Add();
  if (fetched.miss_reason == MissReason::kGeneration) rebind_.store(true);
  if (fetched.miss_reason == MissReason::kDeadline) tally_.deadline_exceeded.Add();
}

void ReplicaWorker::NoteFetchFailure(SequenceStart& start, const absl::Status& status) {
  const bool late = absl::IsDeadlineExceeded(status);
  start.stats.miss_reason = MissReasonName(late ? MissReason::kDeadline : MissReason::kUnavailable);
  (late ? tally_.deadline_exceeded : tally_.unavailable).Add();
  // kNotFound: crumbd does not know the keyspace any more.
  if (absl::IsNotFound(status)) rebind_.store(true);
}

absl::StatusOr<std::unique_ptr<Sequence>> ReplicaWorker::Begin(std::span<const int32_t> tokens,
                                                               const SequenceOptions& options) {
  if (tokens.empty()) return absl::InvalidArgumentError("Begin without tokens");
  const Duration timeout = options.deadline.value_or(options_.begin_deadline);
  const Binding keyspace = CurrentBinding(std::max(timeout, kBindTimeoutMin));
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
  const int pages_max = rule_.HitTokensMax(static_cast<int>(tokens.size())) / kPageTokens;
  FindShared(start, pages_max);
  FetchRest(start, pages_max, timeout);
  return std::make_unique<ThreeSegmentSequence>(Parts(), options, std::move(start));
}

absl::Status ReplicaWorker::WaitPublished(Duration timeout) {
  return publisher_ == nullptr ? absl::OkStatus() : publisher_->WaitIdle(timeout);
}

}  // namespace crumb::client
