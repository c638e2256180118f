// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/prefix_finder.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "client/worker/prompt_key_cache.h"
#include "common/placement.h"

namespace crumb::client {
namespace {

// Timeout for crumbd to count keys.
constexpr Duration kCountTimeout = std::chrono::milliseconds(50);
// Maximum number of parts in which the unknown pages of a prompt are acquired, each with a request.
// More parts pay off if pages are copied, because copies start with the first part and the last
// part is smaller.
constexpr int kPartsMax = 2;
constexpr int kCopiedPartsMax = 4;
// Number of pages that are hashed between two checks whether crumbd has responded.
constexpr size_t kHashedBetweenLooks = 64;

// Returns the ends of the parts in which a prompt's pages are acquired one after the other. The
// keys of a part are hashed while crumbd looks for the part before. `known` pages need no hashing.
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

// Returns the number of tokens of a prompt behind its first `pages` pages.
int WindowTokens(size_t tokens, int pages) {
  return static_cast<int>(tokens) - pages * kPageTokens;
}

}  // namespace

PrefixFinder::PrefixFinder(const WorkerOptions& options, Client* client, PageIntake* intake,
                           SharedPages* shared, PagePool& pool, PageTable& table,
                           WorkerTally& tally, std::function<void()> stale)
    : options_(options),
      rule_{.recent_tokens = options.recent_tokens, .prefill_block = options.prefill_block},
      client_(client),
      intake_(intake),
      parts_max_(intake != nullptr && shared == nullptr ? kCopiedPartsMax : kPartsMax),
      table_(table),
      tally_(tally),
      stale_(std::move(stale)) {
  if (client_ != nullptr) {
    fetcher_ = std::make_unique<PageFetcher>(options_, *client_, pool, shared);
  }
}

// Uses pages of live sequences without a request to crumbd, as long as they have the generation in
// which the sequence begins: dropped pages must not return in pages computed over them.
void PrefixFinder::FindShared(SequenceStart& start, int pages_max) const {
  while (static_cast<int>(start.pages.size()) < pages_max) {
    std::shared_ptr<const Page> page =
        table_.Find(start.prompt_keys[start.pages.size()], start.keyspace->generation);
    if (page == nullptr) break;
    start.pages.push_back(std::move(page));
  }
}

void PrefixFinder::CountShared(SequenceStart& start) {
  start.stats.hit_tokens_worker = static_cast<int>(start.pages.size()) * kPageTokens;
  tally_.hit_tokens_worker.Add(start.stats.hit_tokens_worker);
}

bool PrefixFinder::CanFetch(const SequenceStart& start) const {
  return fetcher_ != nullptr && start.keyspace->known_to_crumbd;
}

// Returns null if pages are read where crumbd has them.
std::unique_ptr<PageIntake::Prefix> PrefixFinder::NewPrefix(const SequenceStart& start,
                                                            int pages_max) const {
  return intake_ == nullptr ? nullptr : intake_->NewPrefix(start.keyspace, pages_max);
}

void PrefixFinder::FetchRest(SequenceStart& start, int pages_max, Duration timeout) {
  const int first = static_cast<int>(start.pages.size());
  if (!CanFetch(start) || first >= pages_max) return;
  const int window = WindowTokens(start.prompt->size(), pages_max);
  absl::StatusOr<FetchedPages> fetched = fetcher_->Fetch(
      PageRequest(*start.keyspace, start.prompt_keys, first, pages_max, window, timeout));
  if (!fetched.ok()) return NoteFetchFailure(start, fetched.status());
  const auto intake = NewPrefix(start, pages_max - first);
  NoteFetched(start, *fetched, fetched->page_tiers, intake.get());
}

// Parts is the state of Find, which acquires the prefix of one prompt in parts.
class PrefixFinder::Parts {
 public:
  Parts(PrefixFinder& finder, SequenceStart& start, std::span<const int32_t> tokens,
        const SequenceOptions& options)
      : finder_(finder),
        start_(start),
        tokens_(tokens),
        options_(options),
        timeout_(options.deadline.value_or(finder.options_.begin_deadline)),
        deadline_(Clock::Real().Now() + timeout_),
        pages_max_(finder.HitPagesMax(tokens.size(), options)),
        ends_(PartEnds(static_cast<int>(start.prompt_keys.size()), pages_max_,
                       finder.options_.part_pages, finder.parts_max_)) {}

  int have() const { return static_cast<int>(start_.pages.size()); }

  PageFetcher::PendingFetch Start(int first, size_t part) const {
    Duration left = timeout_;
    if (left > Duration::zero()) left = std::max(deadline_ - Clock::Real().Now(), Duration(1));
    const bool last = part + 1 == ends_.size();
    return finder_.fetcher_->Start(
        PageRequest(*start_.keyspace, start_.prompt_keys, first, ends_[part],
                    last ? WindowTokens(tokens_.size(), pages_max_) : 0, left));
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

  // Takes the pages of the requested part.
  void Take() {
    absl::StatusOr<FetchedPages> fetched =
        finder_.fetcher_->Finish(*std::exchange(pending_, std::nullopt));
    failed_ = !fetched.ok();
    if (fetched.ok()) {
      finder_.NoteFetched(start_, *fetched, fetched->page_tiers, intake_.get());
    } else {
      finder_.NoteFetchFailure(start_, fetched.status());
    }
    whole_ = have() == ends_[part_];
  }

  // Reports the keys behind a miss to crumbd, which counts them as requested and looks none up.
  void CountRest() {
    Hash(static_cast<size_t>(pages_max_));
    PageRequest request(*start_.keyspace, start_.prompt_keys, ends_[part_], pages_max_,
                        WindowTokens(tokens_.size(), pages_max_), kCountTimeout);
    request.behind_miss = true;
    finder_.fetcher_->Fetch(request).status().IgnoreError();
  }

 private:
  friend class PrefixFinder;

  void Hash(size_t end) { finder_.Hash(start_, tokens_, options_, end); }

  PrefixFinder& finder_;
  SequenceStart& start_;
  const std::span<const int32_t> tokens_;
  const SequenceOptions& options_;
  const Duration timeout_;
  const TimePoint deadline_;
  const int pages_max_;
  const std::vector<int> ends_;
  size_t part_ = 0;
  std::unique_ptr<PageIntake::Prefix> intake_;        // null: pages are read where crumbd has them
  std::optional<PageFetcher::PendingFetch> pending_;  // null: no request is in flight
  bool polled_ = false;  // the response was checked while the next part is hashed
  bool whole_ = false;   // all pages of the last part were taken
  bool failed_ = false;
};

void PrefixFinder::Hash(SequenceStart& start, std::span<const int32_t> tokens,
                        const SequenceOptions& options, size_t end) const {
  HashPages(tokens, options.extra, end, &start.prompt_keys, &start.chain);
}

void PrefixFinder::HashRest(SequenceStart& start, std::span<const int32_t> tokens,
                            const SequenceOptions& options) const {
  Hash(start, tokens, options, tokens.size() / kPageTokens);
  if (start.prompt != nullptr) return;
  start.prompt = std::make_shared<const std::vector<int32_t>>(tokens.begin(), tokens.end());
}

// Fetches the prefix that every rank can have: pages of which crumbd has all layers and heads, and
// this rank can read its part. Pages of live sequences only save this rank the reading. Returns the
// pages' tiers.
std::vector<Tier> PrefixFinder::FindWhole(SequenceStart& start, int pages_max, Duration timeout) {
  if (!CanFetch(start) || pages_max == 0) return {};
  FindShared(start, pages_max);
  const int window = WindowTokens(start.prompt->size(), pages_max);
  PageRequest request(*start.keyspace, start.prompt_keys, 0, pages_max, window, timeout);
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

// Takes this rank's part of the leader's prefix under the leader's lease.
void PrefixFinder::JoinLease(SequenceStart& start, const LeadToken& token, Duration timeout) {
  const int pages = static_cast<int>(token.tiers.size());
  const int have = static_cast<int>(start.pages.size());
  if (token.lease == 0 || have >= pages || token.keyspace.epoch != client_->epoch()) return;
  PageRequest request(*start.keyspace, start.prompt_keys, 0, pages, 0, timeout);
  request.lease = token.lease;
  // The client may have connected to another crumbd since the check above.
  request.lease_epoch = token.keyspace.epoch;
  request.skip = have;
  absl::StatusOr<FetchedPages> fetched = fetcher_->Fetch(request);
  if (!fetched.ok()) return NoteFetchFailure(start, fetched.status());
  const uint64_t epoch = fetched->lease == nullptr ? 0 : fetched->lease->epoch();
  if (epoch != 0 && epoch != token.keyspace.epoch) {
    return NoteFetchFailure(start, absl::AbortedError("another crumbd responded"));
  }
  const auto intake = NewPrefix(start, pages);
  NoteFetched(start, *fetched, std::span(token.tiers).subspan(have), intake.get());
}

// `tiers` has at least one element per fetched page.
void PrefixFinder::NoteFetched(SequenceStart& start, FetchedPages& fetched,
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
  if (fetched.miss_reason == MissReason::kGeneration) stale_();
  if (fetched.miss_reason == MissReason::kDeadline) tally_.deadline_exceeded.Add();
}

void PrefixFinder::NoteFetchFailure(SequenceStart& start, const absl::Status& status) {
  const bool late = absl::IsDeadlineExceeded(status);
  start.stats.miss_reason = MissReasonName(late ? MissReason::kDeadline : MissReason::kUnavailable);
  (late ? tally_.deadline_exceeded : tally_.unavailable).Add();
  // kNotFound means that crumbd does not know the keyspace any more.
  if (absl::IsNotFound(status)) stale_();
}

int PrefixFinder::HitPagesMax(size_t tokens, const SequenceOptions& options) const {
  const int allowed = rule_.HitTokensMax(static_cast<int>(tokens));
  return std::clamp(options.cached_tokens_max.value_or(allowed), 0, allowed) / kPageTokens;
}

void PrefixFinder::Find(SequenceStart& start, std::span<const int32_t> tokens,
                        const SequenceOptions& options) {
  Parts parts(*this, start, tokens, options);
  const std::vector<int>& ends = parts.ends_;
  size_t& part = parts.part_;
  for (; part < ends.size(); ++part) {
    parts.Hash(static_cast<size_t>(ends[part]));
    FindShared(start, ends[part]);
    if (parts.have() < ends[part]) break;  // live sequences do not have all of the part
  }
  CountShared(start);
  auto& pending = parts.pending_;
  if (part < ends.size() && CanFetch(start)) {
    parts.intake_ = NewPrefix(start, parts.pages_max_ - parts.have());
    pending = parts.Start(parts.have(), part);
  }
  // A part is requested once crumbd has responded that it has all of the part before: before that
  // part's pages are taken, unless they have to be copied, which starts as soon as crumbd has
  // responded.
  for (; pending.has_value(); ++part) {
    const bool last = part + 1 == ends.size();
    parts.HashAhead(last ? tokens.size() / kPageTokens : static_cast<size_t>(ends[part + 1]));
    if (last) HashRest(start, tokens, options);
    const bool whole = pending.has_value() ? pending->Await() : parts.whole_;
    std::optional<PageFetcher::PendingFetch> next;
    if (whole && !last) next = parts.Start(ends[part], part + 1);
    if (pending.has_value()) parts.Take();
    if (!parts.whole_ && !last && !next.has_value() && !parts.failed_) parts.CountRest();
    if (parts.whole_) pending = std::move(next);
  }
  HashRest(start, tokens, options);
}

void PrefixFinder::FindLed(SequenceStart& start, const LeadToken& token, Duration timeout) {
  const int pages = static_cast<int>(token.tiers.size());
  FindShared(start, pages);
  CountShared(start);
  if (fetcher_ != nullptr) JoinLease(start, token, timeout);
  FetchRest(start, pages, timeout);
}

}  // namespace crumb::client
