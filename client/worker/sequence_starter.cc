// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/sequence_starter.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "client/worker/page_publisher.h"
#include "common/placement.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {

using kernels::PageFormat;

namespace {

// For a sequence that waits for nothing: crumbd answers from memory.
constexpr Duration kBindTimeoutMin = std::chrono::milliseconds(50);
// For crumbd to count keys.
constexpr Duration kCountTimeout = std::chrono::milliseconds(50);
// Parts of what is not known of a prompt, at most: each is a question of its own. More where pages
// are copied: they begin to come with the first one, and the last ones are fewer.
constexpr int kPartsMax = 2;
constexpr int kCopiedPartsMax = 4;
// Pages that are hashed before it is looked again whether crumbd has answered.
constexpr size_t kHashedBetweenLooks = 64;

// Where the parts of a prompt's pages end that are asked for one after the other: while crumbd
// looks for a part the next one's keys are hashed. `known` of them need no hashing.
std::vector<int> PartEnds(int known, int pages, int part_pages, int parts_max) {
  std::vector<int> ends;
  const int fresh = pages - std::min(known, pages);
  if (part_pages > 0) {
    const int run = std::min(part_pages, static_cast<int>(kRunPages));
    const int parts = std::min(parts_max, fresh / part_pages);
    if (known >= part_pages && parts > 0) ends.push_back(known / run * run);
    for (int part = 1; part < parts; ++part) {
      ends.push_back((pages - fresh + fresh * part / parts) / run * run);
    }
  }
  ends.push_back(pages);
  return ends;
}

// Of a prompt, behind those pages.
int WindowTokens(size_t tokens, int pages) {
  return static_cast<int>(tokens) - pages * kPageTokens;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SequenceStarter>> SequenceStarter::Create(
    const WorkerOptions& options, Client* client, PageReader& reader, PageIntake* intake,
    InPlaceCommitter* place) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<SequenceStarter> starter(
      new SequenceStarter(options, client, reader, intake, place));
  // The publisher's thread is there first: the binder may have something to run on it.
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
                                 PageIntake* intake, InPlaceCommitter* place)
    : options_(options),
      rule_{.recent_tokens = options.recent_tokens, .prefill_block = options.prefill_block},
      client_(client),
      intake_(intake),
      pool_(options.page_bytes_max),
      prompt_key_cache_(options.prompt_key_cache_tokens),
      watch_(options_, [this](double error) { NoteBadQuality(error); }),
      null_publisher_(std::make_unique<NullPublisher>(tally_)) {
  if (client_ == nullptr) return;
  fetcher_ = std::make_unique<PageFetcher>(options_, *client_, pool_, intake_);
  publisher_ = std::make_unique<Publisher>(options_, *client_, reader, place, tally_,
                                           [this] { binder_->Invalidate(); });
}

// New sequences store BF16 once the quality watch has found the error of INT2 pages too large.
void SequenceStarter::NoteBadQuality(double error) {
  tally_.quality_alarms.Add();
  binder_->GiveUpInt2(
      fmt::format("mean attention error {:.3f} over {} windows is above the bound {:.3f}", error,
                  options_.watch_windows, watch_.bound()));
}

// Pages of live sequences need no question to crumbd, as long as they are of the generation that
// the sequence begins in: what was dropped must not come back in pages that are computed over it.
void SequenceStarter::FindShared(SequenceStart& start, int pages_max) const {
  while (static_cast<int>(start.pages.size()) < pages_max) {
    std::shared_ptr<const Page> page =
        table_.Find(start.prompt_keys[start.pages.size()], start.keyspace->generation);
    if (page == nullptr) break;
    start.pages.push_back(std::move(page));
  }
}

void SequenceStarter::CountShared(SequenceStart& start) {
  start.stats.hit_tokens_worker = static_cast<int>(start.pages.size()) * kPageTokens;
  tally_.hit_tokens_worker.Add(start.stats.hit_tokens_worker);
}

// Pages [first, end) of the prompt.
PageRequest SequenceStarter::RequestFor(const SequenceStart& start, int first, int end,
                                        int window_tokens, Duration timeout) const {
  return {.keyspace = start.keyspace.get(),
          .first_page = first,
          .parent = first == 0 ? PageKey{} : start.prompt_keys[first - 1],
          .run = start.prompt_keys[first / kRunPages * kRunPages],
          .keys = std::span(start.prompt_keys).subspan(first, end - first),
          .window_tokens = window_tokens,
          .timeout = timeout,
          .whole_pages = false,
          .lease = 0,
          .skip = 0,
          .behind_miss = false};
}

bool SequenceStarter::CanFetch(const SequenceStart& start) const {
  return fetcher_ != nullptr && start.keyspace->known_to_crumbd;
}

// Null: pages are read where crumbd has them.
std::unique_ptr<PageIntake::Prefix> SequenceStarter::NewPrefix(const SequenceStart& start,
                                                               int pages_max) const {
  return intake_ == nullptr ? nullptr : intake_->NewPrefix(start.keyspace, pages_max);
}

void SequenceStarter::FetchRest(SequenceStart& start, int pages_max, Duration timeout) {
  const int first = static_cast<int>(start.pages.size());
  if (!CanFetch(start) || first >= pages_max) return;
  const int window = WindowTokens(start.prompt->size(), pages_max);
  absl::StatusOr<FetchedPages> fetched =
      fetcher_->Fetch(RequestFor(start, first, pages_max, window, timeout));
  if (!fetched.ok()) return NoteFetchFailure(start, fetched.status());
  const auto intake = NewPrefix(start, pages_max - first);
  NoteFetched(start, *fetched, fetched->page_tiers, intake.get());
}

int SequenceStarter::PartsMax() const {
  return intake_ != nullptr && !intake_->attends_in_place() ? kCopiedPartsMax : kPartsMax;
}

// The prefix of one prompt, asked for in parts. A part is asked for once all of the one before is
// known to be there: before that one's pages are taken, unless they have to be copied, which begins
// as soon as crumbd has answered.
class SequenceStarter::Parts {
 public:
  Parts(SequenceStarter& starter, SequenceStart& start, std::span<const int32_t> tokens,
        const SequenceOptions& options)
      : starter_(starter),
        start_(start),
        tokens_(tokens),
        options_(options),
        timeout_(options.deadline.value_or(starter.options_.begin_deadline)),
        deadline_(Clock::Real().Now() + timeout_),
        pages_max_(starter.HitPagesMax(tokens.size(), options)),
        ends_(PartEnds(static_cast<int>(start.prompt_keys.size()), pages_max_,
                       starter.options_.part_pages, starter.PartsMax())) {}

  void Fetch() {
    TakeShared();
    if (part_ == ends_.size() || !starter_.CanFetch(start_)) return;
    intake_ = starter_.NewPrefix(start_, pages_max_ - have());
    pending_ = Start(have(), part_);
    for (; pending_.has_value(); ++part_) {
      const bool last = part_ + 1 == ends_.size();
      HashAhead(last ? tokens_.size() / kPageTokens : static_cast<size_t>(ends_[part_ + 1]));
      if (last) starter_.HashRest(start_, tokens_, options_);
      const bool whole = pending_.has_value() ? pending_->Await() : whole_;
      std::optional<PageFetcher::PendingFetch> next;
      if (whole && !last) next = Start(ends_[part_], part_ + 1);
      if (pending_.has_value()) Take();
      if (!whole_ && !last && !next.has_value() && !failed_) CountRest();
      if (whole_) pending_ = std::move(next);
    }
  }

 private:
  int have() const { return static_cast<int>(start_.pages.size()); }
  void Hash(size_t end) { starter_.Hash(start_, tokens_, options_, end); }

  // Parts that live sequences have need no question.
  void TakeShared() {
    for (; part_ < ends_.size(); ++part_) {
      Hash(static_cast<size_t>(ends_[part_]));
      starter_.FindShared(start_, ends_[part_]);
      if (have() < ends_[part_]) break;
    }
    starter_.CountShared(start_);
  }

  PageFetcher::PendingFetch Start(int first, size_t part) const {
    Duration left = timeout_;
    if (left > Duration::zero()) left = std::max(deadline_ - Clock::Real().Now(), Duration(1));
    const bool last = part + 1 == ends_.size();
    return starter_.fetcher_->Start(starter_.RequestFor(
        start_, first, ends_[part], last ? WindowTokens(tokens_.size(), pages_max_) : 0, left));
  }

  void HashAhead(size_t end) {
    while (start_.prompt_keys.size() < end) {
      Hash(std::min(end, start_.prompt_keys.size() + kHashedBetweenLooks));
      if (intake_ == nullptr || !pending_.has_value() || polled_ || !pending_->Ready()) continue;
      polled_ = true;
      pending_->Await();
      if (pending_->HasCopies()) Take();
    }
    polled_ = false;
  }

  // The pages of the part that was asked for.
  void Take() {
    absl::StatusOr<FetchedPages> fetched =
        starter_.fetcher_->Finish(*std::exchange(pending_, std::nullopt));
    failed_ = !fetched.ok();
    if (fetched.ok()) {
      starter_.NoteFetched(start_, *fetched, fetched->page_tiers, intake_.get());
    } else {
      starter_.NoteFetchFailure(start_, fetched.status());
    }
    whole_ = have() == ends_[part_];
  }

  // Nobody looks for what lies behind a miss, but it was asked for.
  void CountRest() {
    Hash(static_cast<size_t>(pages_max_));
    PageRequest request = starter_.RequestFor(
        start_, ends_[part_], pages_max_, WindowTokens(tokens_.size(), pages_max_), kCountTimeout);
    request.behind_miss = true;
    starter_.fetcher_->Fetch(request).status().IgnoreError();
  }

  SequenceStarter& starter_;
  SequenceStart& start_;
  const std::span<const int32_t> tokens_;
  const SequenceOptions& options_;
  const Duration timeout_;
  const TimePoint deadline_;
  const int pages_max_;
  const std::vector<int> ends_;
  size_t part_ = 0;
  std::unique_ptr<PageIntake::Prefix> intake_;        // null: pages are read where crumbd has them
  std::optional<PageFetcher::PendingFetch> pending_;  // null: taken
  bool polled_ = false;  // at the answer, while the next part is hashed
  bool whole_ = false;   // the last part that was taken
  bool failed_ = false;
};

void SequenceStarter::Hash(SequenceStart& start, std::span<const int32_t> tokens,
                           const SequenceOptions& options, size_t end) const {
  HashPages(tokens, options.extra, end, &start.prompt_keys, &start.chain);
}

void SequenceStarter::HashRest(SequenceStart& start, std::span<const int32_t> tokens,
                               const SequenceOptions& options) const {
  Hash(start, tokens, options, tokens.size() / kPageTokens);
  if (start.prompt != nullptr) return;
  start.prompt = std::make_shared<const std::vector<int32_t>>(tokens.begin(), tokens.end());
}

// The prefix that every rank can have: what crumbd holds for all layers and heads, and this rank
// can read. Pages of live sequences spare this rank the reading only. Returns the pages' tiers.
std::vector<Tier> SequenceStarter::FetchWhole(SequenceStart& start, int pages_max,
                                              Duration timeout) {
  if (!CanFetch(start) || pages_max == 0) return {};
  FindShared(start, pages_max);
  const int window = WindowTokens(start.prompt->size(), pages_max);
  PageRequest request = RequestFor(start, 0, pages_max, window, timeout);
  request.whole_pages = true;
  request.skip = static_cast<int>(start.pages.size());
  absl::StatusOr<FetchedPages> fetched = fetcher_->Fetch(request);
  if (!fetched.ok()) {
    start.pages.clear();
    NoteFetchFailure(start, fetched.status());
    return {};
  }
  const std::vector<Tier>& tiers = fetched->page_tiers;
  start.pages.resize(std::min(start.pages.size(), tiers.size()));
  CountShared(start);
  const auto intake = NewPrefix(start, pages_max);
  NoteFetched(start, *fetched, std::span(tiers).subspan(start.pages.size()), intake.get());
  start.lease = std::move(fetched->lease);
  start.lease_id = fetched->lease_id;
  fetched->page_tiers.resize(start.pages.size());
  return std::move(fetched->page_tiers);
}

// Takes this rank's part of the leader's prefix from the leader's lease.
void SequenceStarter::JoinLease(SequenceStart& start, const LeadToken& token, Duration timeout) {
  const int pages = static_cast<int>(token.tiers.size());
  const int have = static_cast<int>(start.pages.size());
  if (token.lease == 0 || have >= pages || token.keyspace.epoch != client_->epoch()) return;
  PageRequest request = RequestFor(start, 0, pages, 0, timeout);
  request.lease = token.lease;
  // The connection may have become another crumbd's since the look above.
  request.lease_epoch = token.keyspace.epoch;
  request.skip = have;
  absl::StatusOr<FetchedPages> fetched = fetcher_->Fetch(request);
  if (!fetched.ok()) return NoteFetchFailure(start, fetched.status());
  const uint64_t epoch = fetched->lease == nullptr ? 0 : fetched->lease->epoch();
  if (epoch != 0 && epoch != token.keyspace.epoch) {
    return NoteFetchFailure(start, absl::AbortedError("another crumbd answered"));
  }
  const auto intake = NewPrefix(start, pages);
  NoteFetched(start, *fetched, std::span(token.tiers).subspan(have), intake.get());
}

// `tiers` of the fetched pages, or of more.
void SequenceStarter::NoteFetched(SequenceStart& start, FetchedPages& fetched,
                                  std::span<const Tier> tiers, PageIntake::Prefix* intake) {
  if (intake != nullptr && !fetched.pages.empty()) {
    const size_t pages = fetched.pages.size();
    fetched.pages = intake->Take(std::move(fetched.pages));
    if (fetched.pages.size() < pages) fetched.miss_reason = MissReason::kBusy;
  }
  int device = 0, host = 0, ssd = 0, remote = 0;
  for (size_t i = 0; i < fetched.pages.size(); ++i) {
    const bool placed = fetched.pages[i]->placed;
    if (intake_ != nullptr && !placed) start.stats.loaded_bytes += fetched.pages[i]->bytes;
    int& tier = tiers[i] == Tier::kDevice   ? device
                : tiers[i] == Tier::kSsd    ? ssd
                : tiers[i] == Tier::kRemote ? remote
                                            : host;
    tier += kPageTokens;
  }
  auto shared = table_.ShareAll(std::move(fetched.pages));
  start.pages.insert(start.pages.end(), std::move_iterator(shared.begin()),
                     std::move_iterator(shared.end()));
  start.stats.hit_tokens_device += device;
  start.stats.hit_tokens_host += host;
  start.stats.hit_tokens_ssd += ssd;
  start.stats.hit_tokens_remote += remote;
  start.stats.fetched_bytes += fetched.bytes;
  tally_.hit_tokens_device.Add(device);
  tally_.hit_tokens_host.Add(host);
  tally_.hit_tokens_ssd.Add(ssd);
  tally_.hit_tokens_remote.Add(remote);
  if (fetched.miss_reason == MissReason::kNone) return;
  start.stats.miss_reason = MissReasonName(fetched.miss_reason);
  if (fetched.miss_reason == MissReason::kCorrupt) tally_.verify_failures.Add();
  if (fetched.miss_reason == MissReason::kGeneration) binder_->Invalidate();
  if (fetched.miss_reason == MissReason::kDeadline) tally_.deadline_exceeded.Add();
}

// For crumbd's metrics, where an engine counts once: followers do not tell.
void SequenceStarter::NoteUsed(const SequenceStart& start) {
  const int fetched = start.stats.hit_tokens() - start.stats.hit_tokens_worker;
  if (fetched == 0) return;
  const auto tokens = static_cast<uint64_t>(fetched);
  client_->Count({.used_tokens = tokens, .prefill_tokens_avoided = tokens});
}

void SequenceStarter::NoteFetchFailure(SequenceStart& start, const absl::Status& status) {
  const bool late = absl::IsDeadlineExceeded(status);
  start.stats.miss_reason = MissReasonName(late ? MissReason::kDeadline : MissReason::kUnavailable);
  (late ? tally_.deadline_exceeded : tally_.unavailable).Add();
  // kNotFound: crumbd does not know the keyspace any more.
  if (absl::IsNotFound(status)) binder_->Invalidate();
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

// Behind everything that the device can begin with.
void SequenceStarter::KeepPrompt(const SequenceStart& start, const SequenceOptions& options) {
  prompt_key_cache_.Keep(start.keyspace->id, start.prompt, options.extra, start.prompt_keys);
}

int SequenceStarter::HitPagesMax(size_t tokens, const SequenceOptions& options) const {
  const int allowed = rule_.HitTokensMax(static_cast<int>(tokens));
  return std::clamp(options.cached_tokens_max.value_or(allowed), 0, allowed) / kPageTokens;
}

absl::StatusOr<SequenceStart> SequenceStarter::Begin(std::span<const int32_t> tokens,
                                                     const SequenceOptions& options) {
  if (tokens.empty()) return absl::InvalidArgumentError("Begin without tokens");
  const Duration timeout = options.deadline.value_or(options_.begin_deadline);
  SequenceStart start =
      StartOf(binder_->Current(std::max(timeout, kBindTimeoutMin)), tokens, options);
  Parts(*this, start, tokens, options).Fetch();
  HashRest(start, tokens, options);
  NoteUsed(start);
  KeepPrompt(start, options);
  return start;
}

absl::StatusOr<LedStart> SequenceStarter::Lead(std::span<const int32_t> tokens,
                                               const SequenceOptions& options) {
  if (tokens.empty()) return absl::InvalidArgumentError("Lead without tokens");
  const Duration timeout = options.deadline.value_or(options_.begin_deadline);
  SequenceStart start =
      StartOf(binder_->Current(std::max(timeout, kBindTimeoutMin)), tokens, options);
  HashRest(start, tokens, options);
  LeadToken token;
  token.model = binder_->PrivateId(start.keyspace->history_format);
  token.keyspace = *start.keyspace;
  token.tiers = FetchWhole(start, HitPagesMax(tokens.size(), options), timeout);
  token.lease = start.lease_id;
  if (!start.pages.empty()) token.last_key = start.prompt_keys[start.pages.size() - 1];
  NoteUsed(start);
  KeepPrompt(start, options);
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
  HashRest(start, tokens, options);
  const size_t pages = token.tiers.size();
  if (pages >
          static_cast<size_t>(rule_.HitTokensMax(static_cast<int>(tokens.size()))) / kPageTokens ||
      (pages > 0 && start.prompt_keys[pages - 1] != token.last_key)) {
    return absl::InvalidArgumentError("the token is of another prompt");
  }
  FindShared(start, static_cast<int>(pages));
  CountShared(start);
  if (fetcher_ != nullptr) JoinLease(start, token, timeout);
  FetchRest(start, static_cast<int>(pages), timeout);
  if (start.pages.size() < pages) {
    return absl::AbortedError("this rank has " + std::to_string(start.pages.size() * kPageTokens) +
                              " of the cached tokens, " + start.stats.miss_reason +
                              ": lead again with that cached_tokens_max");
  }
  start.stats.miss_reason.clear();
  KeepPrompt(start, options);
  return start;
}

absl::Status SequenceStarter::WaitPublished(Duration timeout) {
  return publisher_ == nullptr ? absl::OkStatus() : publisher_->WaitIdle(timeout);
}

}  // namespace crumb::client
