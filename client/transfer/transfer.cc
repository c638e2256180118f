// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/transfer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "client/cpu/cpu_backend.h"
#include "client/transfer/paged_cache.h"
#include "client/worker/keyspace_binder.h"
#include "client/worker/lead_token.h"
#include "client/worker/page_fetcher.h"
#include "client/worker/page_pool.h"
#include "client/worker/page_reader.h"
#include "client/worker/prompt_key_cache.h"
#include "client/worker/publisher.h"
#include "client/worker/worker_tally.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::PageFormat;

// Maximum number of pages in one store or load; a sequence of 16 Mi tokens.
constexpr int kPagesMax = 1 << 18;

absl::Status CheckLayers(int begin, int end, int layers) {
  if (begin >= 0 && begin <= end && end <= layers) return absl::OkStatus();
  return absl::OutOfRangeError(
      fmt::format("layers [{}, {}) of a rank that has {}", begin, end, layers));
}

// State that the loads and stores of one Transfer have in common.
struct TransferParts {
  const WorkerOptions& options;
  const CpuBackend& backend;
  WorkerTally& tally;
};

// Number of tiles passed to WorkerOptions::parallel_for at once, whose count is an int.
constexpr int kTilesAtOnce = 1 << 20;

void ForEachTile(const WorkerOptions& options, size_t pages, int layer_begin, int layer_end,
                 const std::function<void(size_t page, int layer, int head)>& body) {
  const int heads = options.own_kv_heads();
  const int tiles = (layer_end - layer_begin) * heads;
  if (tiles == 0) return;
  const size_t pages_at_once = static_cast<size_t>(std::max(1, kTilesAtOnce / tiles));
  for (size_t first = 0; first < pages; first += pages_at_once) {
    const int count = static_cast<int>(std::min(pages_at_once, pages - first)) * tiles;
    const auto run = [&](int task) {
      const int tile = task % tiles;
      body(first + static_cast<size_t>(task / tiles), layer_begin + tile / heads, tile % heads);
    };
    if (options.parallel_for && count > 1) {
      options.parallel_for(count, run);
    } else {
      for (int task = 0; task < count; ++task) run(task);
    }
  }
}

class HostPageLoad final : public PageLoad {
 public:
  HostPageLoad(const TransferParts& parts, std::shared_ptr<const PagedCache> cache,
               std::span<const int64_t> blocks, std::vector<std::shared_ptr<Page>> pages)
      : parts_(parts),
        cache_(std::move(cache)),
        blocks_(blocks.begin(), blocks.end()),
        pages_(std::move(pages)) {}

  int pages() const override { return static_cast<int>(pages_.size()); }

  absl::Status LoadLayers(int begin, int end) override {
    CRUMB_RETURN_IF_ERROR(CheckLayers(begin, end, parts_.options.own_layers()));
    ForEachTile(parts_.options, pages_.size(), begin, end,
                [this](size_t page, int layer, int head) { LoadTile(*pages_[page], layer, head); });
    return absl::OkStatus();
  }

 private:
  void LoadTile(const Page& page, int layer, int head) const {
    const int dim = parts_.options.head_dim;
    std::vector<Bf16> rows(size_t{2} * kPageTokens * dim);
    Bf16* const v = rows.data() + size_t{kPageTokens} * dim;
    parts_.backend.ReadTile(page, layer, head, rows.data(), v);
    const int at = static_cast<int>(page.position);
    const PagedCache::Layer& to = cache_->layers[layer];
    ScatterPage(rows.data(), cache_->block_tokens, blocks_, at, head, dim, to.k);
    ScatterPage(v, cache_->block_tokens, blocks_, at, head, dim, to.v);
  }

  const TransferParts parts_;
  const std::shared_ptr<const PagedCache> cache_;
  const std::vector<int64_t> blocks_;
  const std::vector<std::shared_ptr<Page>> pages_;
};

class HostPageStore final : public PageStore {
 public:
  HostPageStore(const TransferParts& parts, Publisher& publisher, KeyspaceBinder::Binding keyspace,
                std::shared_ptr<const PagedCache> cache, std::span<const int64_t> blocks,
                std::vector<std::shared_ptr<Page>> pages)
      : parts_(parts),
        publisher_(publisher),
        keyspace_(std::move(keyspace)),
        cache_(std::move(cache)),
        blocks_(blocks.begin(), blocks.end()),
        pages_(std::move(pages)),
        status_(pages_.size()),
        stored_(parts.options.own_layers()) {}

  absl::Status StoreLayers(int begin, int end) override {
    CRUMB_RETURN_IF_ERROR(CheckLayers(begin, end, parts_.options.own_layers()));
    ForEachTile(parts_.options, pages_.size(), begin, end,
                [this](size_t page, int layer, int head) { StoreTile(page, layer, head); });
    std::fill(stored_.begin() + begin, stored_.begin() + end, true);
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    if (std::find(stored_.begin(), stored_.end(), false) != stored_.end()) {
      return absl::FailedPreconditionError("pages were finished before every layer was stored");
    }
    for (size_t i = 0; i < pages_.size(); ++i) {
      parts_.tally.windows_evicted.Add();
      if (status_[i].load() & kernels::kStatusSaturated) parts_.tally.windows_saturated.Add();
      if (status_[i].load() & kernels::kStatusNonFinite) {
        publisher_.NoteRefusedWindow();
      } else if (parts_.options.part.publishes) {
        publisher_.Publish(keyspace_, std::move(pages_[i]));
      }
    }
    pages_.clear();
    return absl::OkStatus();
  }

 private:
  void StoreTile(size_t index, int layer, int head) {
    const Page& page = *pages_[index];
    const int dim = parts_.options.head_dim;
    std::vector<Bf16> rows(size_t{2} * kPageTokens * dim);
    Bf16* const v = rows.data() + size_t{kPageTokens} * dim;
    const int at = static_cast<int>(page.position);
    const PagedCache::Layer& from = cache_->layers[layer];
    GatherPage(from.k, cache_->block_tokens, blocks_, at, head, dim, rows.data());
    GatherPage(from.v, cache_->block_tokens, blocks_, at, head, dim, v);
    const WindowRows window{.k = rows.data(), .v = v, .stride = dim};
    status_[index].fetch_or(parts_.backend.StoreTile(window, layer, head, page));
  }

  const TransferParts parts_;
  Publisher& publisher_;
  const KeyspaceBinder::Binding keyspace_;
  const std::shared_ptr<const PagedCache> cache_;
  const std::vector<int64_t> blocks_;
  std::vector<std::shared_ptr<Page>> pages_;
  std::vector<std::atomic<uint32_t>> status_;  // per page: kernels::kStatus bits of its tiles
  std::vector<bool> stored_;                   // per layer
};

class HostTransfer final : public Transfer {
 public:
  HostTransfer(const WorkerOptions& options, Client& client)
      : options_(options), client_(client), backend_(options_), pool_(options.page_bytes_max) {
    fetcher_ = std::make_unique<PageFetcher>(options_, client_, pool_, nullptr);
    publisher_ = std::make_unique<Publisher>(options_, client_, reader_, nullptr, tally_,
                                             [this] { binder_->Invalidate(); });
  }

  absl::Status Bind() {
    CRUMB_ASSIGN_OR_RETURN(binder_, KeyspaceBinder::Create(options_, &client_, [this](auto task) {
                             publisher_->RunSoon(std::move(task));
                           }));
    return absl::OkStatus();
  }

  absl::Status UseCache(PagedCache cache) override {
    CRUMB_RETURN_IF_ERROR(CheckCache(cache, options_.own_layers()));
    MutexLock lock(&mutex_);
    cache_ = std::make_shared<const PagedCache>(std::move(cache));
    return absl::OkStatus();
  }

  std::string Keyspace(Duration timeout) override {
    const KeyspaceBinder::Binding binding = binder_->Current(timeout);
    return EncodeLeadToken({.model = binder_->PrivateId(binding->history_format),
                            .keyspace = *binding,
                            .lease = 0,
                            .tiers = {},
                            .last_key = {}});
  }

  absl::StatusOr<std::vector<PageKey>> Keys(std::string_view keyspace,
                                            std::span<const int32_t> tokens,
                                            std::span<const Digest> extra) override {
    CRUMB_ASSIGN_OR_RETURN(const LeadToken token, Decode(keyspace));
    std::vector<PageKey> keys;
    PageKeyChain chain(token.keyspace.id);
    HashPages(tokens, extra, tokens.size() / kPageTokens, &keys, &chain);
    return keys;
  }

  absl::StatusOr<TransferPrefix> Acquire(std::string_view keyspace, std::span<const PageKey> keys,
                                         Duration timeout) override {
    CRUMB_ASSIGN_OR_RETURN(LeadToken token, Decode(keyspace));
    tally_.sequences.Add();
    tally_.prompt_tokens.Add(keys.size() * kPageTokens);
    TransferPrefix prefix;
    prefix.miss_reason = MissReason::kUnavailable;
    if (keys.empty() || !token.keyspace.known_to_crumbd) {
      prefix.token = EncodeLeadToken(token);
      return prefix;
    }
    AcquireRequest wanted;
    wanted.keyspace = token.keyspace.id;
    wanted.generation = token.keyspace.generation;
    wanted.keys = keys;
    wanted.run = keys.front();
    wanted.range = options_.all_tiles();
    wanted.wait_for_lower_tiers = timeout > Duration::zero();
    wanted.timeout = wanted.wait_for_lower_tiers ? timeout : kHostOnlyTimeout;
    const absl::StatusOr<AcquireResult> acquired = client_.Acquire(wanted);
    if (acquired.ok()) {
      prefix.pages = acquired->hit_pages;
      prefix.tiers = acquired->page_tiers;
      prefix.miss_reason = acquired->miss_reason;
      prefix.lease = acquired->lease;
      token.lease = acquired->lease_id;
      token.tiers = acquired->page_tiers;
      if (prefix.pages > 0) token.last_key = keys[prefix.pages - 1];
      NoteHits(*acquired);
    } else {
      NoteFailure(acquired.status());
    }
    prefix.token = EncodeLeadToken(token);
    return prefix;
  }

  absl::StatusOr<std::unique_ptr<PageLoad>> StartLoad(std::string_view bytes,
                                                      std::span<const PageKey> keys, int first_page,
                                                      int end_page, std::span<const int64_t> blocks,
                                                      Duration timeout) override {
    CRUMB_ASSIGN_OR_RETURN(const LeadToken token, Decode(bytes));
    CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<const PagedCache> cache, Cache());
    const int held = static_cast<int>(token.tiers.size());
    if (first_page < 0 || first_page >= end_page || end_page > held ||
        static_cast<int>(keys.size()) != end_page) {
      return absl::InvalidArgumentError(
          fmt::format("pages [{}, {}) with {} keys of a prefix of {} pages", first_page, end_page,
                      keys.size(), held));
    }
    CRUMB_RETURN_IF_ERROR(CheckBlocks(*cache, blocks, first_page, end_page));
    std::vector<std::shared_ptr<Page>> pages = Fetch(token, keys, first_page, timeout);
    const auto tokens = pages.size() * kPageTokens;
    if (options_.own_tiles().layers.begin == 0 && options_.own_tiles().heads.begin == 0) {
      client_.Count({.used_tokens = tokens, .prefill_tokens_avoided = tokens});
    }
    return std::make_unique<HostPageLoad>(Parts(), std::move(cache), blocks, std::move(pages));
  }

  absl::StatusOr<std::unique_ptr<PageStore>> StartStore(const StoreRequest& request) override {
    CRUMB_ASSIGN_OR_RETURN(const LeadToken token, Decode(request.keyspace));
    CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<const PagedCache> cache, Cache());
    const size_t count = request.keys.size();
    if (request.first_page < 0 || count == 0 || count > kPagesMax ||
        request.first_page > kPagesMax - static_cast<int>(count)) {
      return absl::InvalidArgumentError(
          fmt::format("a store of {} pages from page {} on", count, request.first_page));
    }
    CRUMB_RETURN_IF_ERROR(CheckBlocks(*cache, request.blocks, request.first_page,
                                      request.first_page + static_cast<int>(count)));
    std::vector<std::shared_ptr<Page>> pages;
    pages.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<Page> page, NewPage(token.keyspace, request, i));
      pages.push_back(std::move(page));
    }
    return std::make_unique<HostPageStore>(Parts(), *publisher_,
                                           std::make_shared<const KeyspaceBinding>(token.keyspace),
                                           std::move(cache), request.blocks, std::move(pages));
  }

  absl::Status WaitPublished(Duration timeout) override { return publisher_->WaitIdle(timeout); }
  WorkerCounters counters() const override { return tally_.Read(); }

 private:
  // Time for crumbd to reply from its memory alone.
  static constexpr Duration kHostOnlyTimeout = std::chrono::milliseconds(50);

  TransferParts Parts() { return {.options = options_, .backend = backend_, .tally = tally_}; }

  absl::StatusOr<LeadToken> Decode(std::string_view bytes) const {
    CRUMB_ASSIGN_OR_RETURN(LeadToken token, DecodeLeadToken(bytes));
    if (token.model != binder_->PrivateId(token.keyspace.history_format)) {
      return absl::InvalidArgumentError(
          "the token is of a Transfer that was opened with other WorkerOptions");
    }
    return token;
  }

  absl::StatusOr<std::shared_ptr<const PagedCache>> Cache() const {
    MutexLock lock(&mutex_);
    if (cache_ == nullptr) return absl::FailedPreconditionError("UseCache was not called");
    return cache_;
  }

  // Returns the pages of the prefix behind `first_page` that this process can read. A failure is a
  // miss.
  std::vector<std::shared_ptr<Page>> Fetch(const LeadToken& token, std::span<const PageKey> keys,
                                           int first_page, Duration timeout) {
    if (token.lease == 0 || token.keyspace.epoch != client_.epoch()) return {};
    PageRequest request;
    request.keyspace = &token.keyspace;
    request.keys = keys;
    request.timeout = timeout;
    request.run = keys.front();
    request.lease = token.lease;
    request.lease_epoch = token.keyspace.epoch;
    request.skip = first_page;
    absl::StatusOr<FetchedPages> fetched = fetcher_->Fetch(request);
    if (!fetched.ok()) {
      NoteFailure(fetched.status());
      return {};
    }
    if (fetched->miss_reason == MissReason::kCorrupt) tally_.verify_failures.Add();
    if (fetched->miss_reason == MissReason::kGeneration) binder_->Invalidate();
    return std::move(fetched->pages);
  }

  absl::StatusOr<std::shared_ptr<Page>> NewPage(const KeyspaceBinding& keyspace,
                                                const StoreRequest& request, size_t index) {
    auto page = std::make_shared<Page>();
    const int number = request.first_page + static_cast<int>(index);
    const TileRange own = options_.own_tiles();
    page->key = request.keys[index];
    page->parent = index == 0 ? request.parent : request.keys[index - 1];
    page->position = static_cast<uint32_t>(number);
    page->generation = keyspace.generation;
    page->format = number == 0 ? PageFormat::kBf16 : keyspace.history_format;
    page->over_int2_prefix = request.over_int2_prefix;
    page->tile_bytes = options_.tile_shape().bytes(page->format);
    page->layer_stride = page->tile_bytes * own.heads.size();
    page->bytes = FragmentTilesBytes(own.tiles(), page->tile_bytes);
    CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, pool_.Allocate(page->bytes));
    page->tiles = memory.get();
    page->memory = std::move(memory);
    return page;
  }

  void NoteHits(const AcquireResult& acquired) {
    for (const Tier tier : acquired.page_tiers) {
      Counter& counter = tier == Tier::kDevice   ? tally_.hit_tokens_device
                         : tier == Tier::kSsd    ? tally_.hit_tokens_ssd
                         : tier == Tier::kRemote ? tally_.hit_tokens_remote
                                                 : tally_.hit_tokens_host;
      counter.Add(kPageTokens);
    }
    if (acquired.miss_reason == MissReason::kGeneration) binder_->Invalidate();
    if (acquired.miss_reason == MissReason::kDeadline) tally_.deadline_exceeded.Add();
  }

  void NoteFailure(const absl::Status& status) {
    (absl::IsDeadlineExceeded(status) ? tally_.deadline_exceeded : tally_.unavailable).Add();
    // kNotFound means that crumbd has lost the keyspace.
    if (absl::IsNotFound(status)) binder_->Invalidate();
  }

  const WorkerOptions options_;
  Client& client_;
  const CpuBackend backend_;
  PagePool pool_;
  HostPageReader reader_;
  WorkerTally tally_;
  std::unique_ptr<PageFetcher> fetcher_;
  std::unique_ptr<KeyspaceBinder> binder_;  // not null once Bind has returned
  mutable Mutex mutex_;
  std::shared_ptr<const PagedCache> cache_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Publisher> publisher_;  // its thread uses everything above
};

}  // namespace

absl::StatusOr<std::unique_ptr<Transfer>> Transfer::Open(const WorkerOptions& options,
                                                         Client* client) {
  if (client == nullptr) return absl::InvalidArgumentError("a Transfer needs a client");
  CRUMB_RETURN_IF_ERROR(options.Validate());
  if (options.v_basis != "model") {
    return absl::InvalidArgumentError(
        "v_basis: an engine's cache has values in the model's basis, and the rotation file has "
        "them rotated");
  }
  auto transfer = std::make_unique<HostTransfer>(options, *client);
  CRUMB_RETURN_IF_ERROR(transfer->Bind());
  return transfer;
}

}  // namespace crumb::client
