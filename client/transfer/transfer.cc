// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/transfer.h"

#include <utility>

#include "client/cpu/cpu_backend.h"
#include "client/transfer/device_pages.h"
#include "client/transfer/host_cache.h"
#include "client/transfer/host_pages.h"
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

using kernels::PageFormat;

// Maximum number of pages in one store or load; a sequence of 16 Mi tokens.
constexpr int kPagesMax = 1 << 18;

class PagedTransfer final : public Transfer {
 public:
  PagedTransfer(const WorkerOptions& options, Client& client)
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
    CRUMB_ASSIGN_OR_RETURN(auto host, NewPagedHostCache(std::move(cache), options_, backend_));
    Use({.host = std::move(host), .device_layout = {}, .device = nullptr});
    return absl::OkStatus();
  }

  absl::Status UseBlocks(BlockCache cache) override {
    CRUMB_ASSIGN_OR_RETURN(auto host, NewBlockHostCache(std::move(cache), options_, backend_));
    Use({.host = std::move(host), .device_layout = {}, .device = nullptr});
    return absl::OkStatus();
  }

  absl::Status UseDeviceCache(PagedCache cache, std::shared_ptr<Device> device,
                              const DeviceCacheOptions& options) override {
    if (device == nullptr) return absl::InvalidArgumentError("a device cache without a device");
    CRUMB_RETURN_IF_ERROR(CheckCache(cache, options_.own_layers()));
    CRUMB_ASSIGN_OR_RETURN(
        std::shared_ptr<DeviceCache> on_device,
        DeviceCache::Create(std::move(device), options_, cache, options, client_));
    Use({.host = nullptr,
         .device_layout = std::make_shared<const PagedCache>(std::move(cache)),
         .device = std::move(on_device)});
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

  absl::StatusOr<std::vector<PageKey>> NextKeys(std::string_view keyspace, const PageKey& parent,
                                                std::span<const int32_t> tokens,
                                                std::span<const Digest> extra) override {
    CRUMB_ASSIGN_OR_RETURN(const LeadToken token, Decode(keyspace));
    std::vector<PageKey> keys;
    PageKeyChain chain(token.keyspace.id, parent);
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
      NoteHits(*acquired, wanted.wait_for_lower_tiers);
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
    CRUMB_ASSIGN_OR_RETURN(UsedCache cache, Cache());
    const int held = static_cast<int>(token.tiers.size());
    if (first_page < 0 || first_page >= end_page || end_page > held ||
        static_cast<int>(keys.size()) != end_page) {
      return absl::InvalidArgumentError(
          fmt::format("pages [{}, {}) with {} keys of a prefix of {} pages", first_page, end_page,
                      keys.size(), held));
    }
    CRUMB_RETURN_IF_ERROR(cache.CheckBlocks(blocks, first_page, end_page));
    // The load holds the memory of the connection, so that it stays pinned. After a reconnection
    // in between the pages lie in memory that is not pinned yet, whose copies are slower.
    std::shared_ptr<const PinnedArena> arena = cache.device ? cache.device->Arena() : nullptr;
    std::vector<std::shared_ptr<Page>> pages = Fetch(token, keys, first_page, timeout);
    const auto tokens = pages.size() * kPageTokens;
    if (options_.own_tiles().layers.begin == 0 && options_.own_tiles().heads.begin == 0) {
      client_.Count({.used_tokens = tokens, .prefill_tokens_avoided = tokens});
    }
    if (cache.device != nullptr) {
      return NewDevicePageLoad(Parts(), std::move(cache.device), std::move(arena), blocks,
                               std::move(pages));
    }
    return NewHostPageLoad(Parts(), std::move(cache.host), blocks, std::move(pages));
  }

  absl::StatusOr<std::unique_ptr<PageStore>> StartStore(const StoreRequest& request) override {
    CRUMB_ASSIGN_OR_RETURN(const LeadToken token, Decode(request.keyspace));
    CRUMB_ASSIGN_OR_RETURN(UsedCache cache, Cache());
    const size_t count = request.keys.size();
    if (request.first_page < 0 || count == 0 || count > kPagesMax ||
        request.first_page > kPagesMax - static_cast<int>(count)) {
      return absl::InvalidArgumentError(
          fmt::format("a store of {} pages from page {} on", count, request.first_page));
    }
    CRUMB_RETURN_IF_ERROR(cache.CheckBlocks(request.blocks, request.first_page,
                                            request.first_page + static_cast<int>(count)));
    if (cache.host != nullptr) {
      CRUMB_RETURN_IF_ERROR(cache.host->CheckFormat(token.keyspace.history_format));
    }
    std::vector<std::shared_ptr<Page>> pages;
    pages.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<Page> page,
                             NewPage(token.keyspace, request, i, cache));
      pages.push_back(std::move(page));
    }
    auto keyspace = std::make_shared<const KeyspaceBinding>(token.keyspace);
    if (cache.device != nullptr) {
      return NewDevicePageStore(Parts(), std::move(cache.device), std::move(keyspace),
                                request.blocks, std::move(pages));
    }
    return NewHostPageStore(Parts(), std::move(cache.host), std::move(keyspace), request.blocks,
                            std::move(pages));
  }

  absl::Status WaitPublished(Duration timeout) override {
    const TimePoint deadline = Clock::Real().Now() + timeout;
    CRUMB_RETURN_IF_ERROR(settler_->WaitIdle(timeout));
    return publisher_->WaitIdle(deadline - Clock::Real().Now());
  }
  WorkerCounters counters() const override { return tally_.Read(); }

 private:
  // Time for crumbd to reply from its memory alone.
  static constexpr Duration kHostOnlyTimeout = std::chrono::milliseconds(50);

  // The cache in use: one in host memory, or one in device memory with its layout. All are null
  // before there is one.
  struct UsedCache {
    std::shared_ptr<const HostCache> host;
    std::shared_ptr<const PagedCache> device_layout;
    std::shared_ptr<DeviceCache> device;

    absl::Status CheckBlocks(std::span<const int64_t> blocks, int first_page, int end_page) const {
      return host != nullptr ? host->CheckBlocks(blocks, first_page, end_page)
                             : client::CheckBlocks(*device_layout, blocks, first_page, end_page);
    }
  };

  TransferParts Parts() {
    return {.options = options_,
            .backend = backend_,
            .tally = tally_,
            .publisher = *publisher_,
            .settler = *settler_};
  }

  void Use(UsedCache cache) {
    UsedCache before;  // destroyed outside the lock
    MutexLock lock(&mutex_);
    before = std::exchange(cache_, std::move(cache));
  }

  absl::StatusOr<LeadToken> Decode(std::string_view bytes) const {
    CRUMB_ASSIGN_OR_RETURN(LeadToken token, DecodeLeadToken(bytes));
    if (token.model != binder_->PrivateId(token.keyspace.history_format)) {
      return absl::InvalidArgumentError(
          "the token is of a Transfer that was opened with other WorkerOptions");
    }
    return token;
  }

  absl::StatusOr<UsedCache> Cache() const {
    MutexLock lock(&mutex_);
    if (cache_.host == nullptr && cache_.device == nullptr) {
      return absl::FailedPreconditionError("no cache was set: UseCache was not called");
    }
    return cache_;
  }

  // Returns the pages of the prefix behind `first_page` that this process can read. A failure is a
  // miss.
  std::vector<std::shared_ptr<Page>> Fetch(const LeadToken& token, std::span<const PageKey> keys,
                                           int first_page, Duration timeout) {
    if (token.lease == 0 || token.keyspace.epoch != client_.epoch()) return {};
    PageRequest request(token.keyspace, keys, 0, static_cast<int>(keys.size()), 0, timeout);
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
                                                const StoreRequest& request, size_t index,
                                                const UsedCache& cache) {
    auto page = std::make_shared<Page>();
    const int number = request.first_page + static_cast<int>(index);
    const TileRange own = options_.own_tiles();
    page->key = request.keys[index];
    page->parent = index == 0 ? request.parent : request.keys[index - 1];
    page->position = static_cast<uint32_t>(number);
    page->generation = keyspace.generation;
    page->format = number == 0 ? PageFormat::kBf16 : keyspace.history_format;
    page->over_int2_prefix =
        request.over_int2_prefix || (cache.host != nullptr && cache.host->ComputedOverInt2(number));
    page->tile_bytes = options_.tile_shape().bytes(page->format);
    page->layer_stride = page->tile_bytes * own.heads.size();
    page->bytes = FragmentTilesBytes(own.tiles(), page->tile_bytes);
    CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory,
                           cache.device == nullptr ? pool_.Allocate(page->bytes)
                                                   : cache.device->AllocatePage(page->bytes));
    page->tiles = memory.get();
    page->memory = std::move(memory);
    return page;
  }

  void NoteHits(const AcquireResult& acquired, bool waited) {
    for (const Tier tier : acquired.page_tiers) {
      Counter& counter = tier == Tier::kDevice   ? tally_.hit_tokens_device
                         : tier == Tier::kSsd    ? tally_.hit_tokens_ssd
                         : tier == Tier::kRemote ? tally_.hit_tokens_remote
                                                 : tally_.hit_tokens_host;
      counter.Add(kPageTokens);
    }
    if (acquired.miss_reason == MissReason::kGeneration) binder_->Invalidate();
    if (waited && acquired.miss_reason == MissReason::kDeadline) tally_.deadline_exceeded.Add();
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
  UsedCache cache_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Publisher> publisher_;  // its thread uses everything above
  // Its thread uses the publisher.
  std::unique_ptr<Background> settler_ = std::make_unique<Background>("crumb-settle");
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
  auto transfer = std::make_unique<PagedTransfer>(options, *client);
  CRUMB_RETURN_IF_ERROR(transfer->Bind());
  return transfer;
}

}  // namespace crumb::client
