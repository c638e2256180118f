// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/core_table.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "client/c_api/handles.h"
#include "client/c_api/options.h"
#include "common/status_macros.h"
#include "crumb/transfer.h"
#include "fmt/format.h"

namespace crumb::c_api {
namespace {

using std::chrono::milliseconds;

absl::Status Null(const char* function, const char* what) {
  return absl::InvalidArgumentError(fmt::format("{}: {} is NULL", function, what));
}

std::string_view Bytes(const void* data, size_t size) {
  return {static_cast<const char*>(data), data == nullptr ? 0 : size};
}

template <typename Id>
std::vector<Id> DigestsOf(const uint8_t* bytes, size_t count) {
  std::vector<Id> ids(count);
  static_assert(sizeof(Id) == CRUMB_KEY_BYTES);
  if (count > 0) std::memcpy(ids.data(), bytes, count * sizeof(Id));
  return ids;
}

absl::Status WriteToken(const char* function, std::string_view from, void* token, size_t capacity,
                        size_t* bytes) {
  if (token == nullptr || bytes == nullptr) return Null(function, "token or token_bytes");
  if (from.size() > capacity) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: the token has {} bytes, and there is room for {}", function, from.size(), capacity));
  }
  std::memcpy(token, from.data(), from.size());
  *bytes = from.size();
  return absl::OkStatus();
}

// scale: the factors of all layers, or null.
client::PagedRows RowsOf(const crumb_paged_rows& rows, const float* scale, uint32_t layer) {
  return {.base = rows.base,
          .block_stride = rows.block_stride,
          .head_stride = rows.head_stride,
          .token_stride = rows.token_stride,
          .element_stride = rows.element_stride,
          .scale = scale == nullptr ? 1.0f : scale[layer]};
}

// Converts a number of pages to an int.
absl::StatusOr<int> PagesOf(const char* function, size_t pages) {
  if (pages <= INT32_MAX / CRUMB_PAGE_TOKENS) return static_cast<int>(pages);
  return absl::InvalidArgumentError(fmt::format("{}: {} pages", function, pages));
}

}  // namespace

crumb_code TransferOpen(crumb_client* client, const crumb_worker_options* options,
                        crumb_transfer** out) {
  return Guarded([&]() -> absl::Status {
    if (options == nullptr || out == nullptr) return Null("crumb_transfer_open", "options or out");
    CRUMB_ASSIGN_OR_RETURN(const client::WorkerOptions wanted, OptionsOf(Known(options)));
    CRUMB_ASSIGN_OR_RETURN(auto transfer, client::Transfer::Open(wanted, client->client.get()));
    *out = new crumb_transfer{client->client, std::move(transfer)};
    return absl::OkStatus();
  });
}

void TransferClose(crumb_transfer* transfer) { delete transfer; }

crumb_code TransferUseCache(crumb_transfer* transfer, const crumb_paged_cache* given) {
  return Guarded([&]() -> absl::Status {
    const crumb_paged_cache cache = Known(given);
    if (cache.k == nullptr || cache.v == nullptr) return Null("crumb_transfer_use_cache", "k or v");
    client::PagedCache view;
    view.blocks = static_cast<int64_t>(std::min<uint64_t>(cache.blocks, INT64_MAX));
    view.block_tokens = IntOf(cache.block_tokens);
    if (cache.element > CRUMB_ROWS_FP8_E4M3) {
      return absl::InvalidArgumentError(fmt::format(
          "crumb_transfer_use_cache: element is {}, which is none of CRUMB_ROWS_*", cache.element));
    }
    view.element = static_cast<client::RowElement>(cache.element);
    for (uint32_t i = 0; i < cache.layers; ++i) {
      view.layers.push_back(
          {.k = RowsOf(cache.k[i], cache.k_scale, i), .v = RowsOf(cache.v[i], cache.v_scale, i)});
    }
    if (cache.device == nullptr) return transfer->transfer->UseCache(std::move(view));
    client::DeviceCacheOptions options;
    if (cache.staging_bytes != 0) options.staging_bytes = cache.staging_bytes;
    return transfer->transfer->UseDeviceCache(std::move(view), cache.device->device, options);
  });
}

crumb_code TransferKeyspace(crumb_transfer* transfer, uint32_t timeout_ms, void* token,
                            size_t token_capacity, size_t* token_bytes) {
  return Guarded([&] {
    return WriteToken("crumb_transfer_keyspace",
                      transfer->transfer->Keyspace(milliseconds(timeout_ms)), token, token_capacity,
                      token_bytes);
  });
}

crumb_code TransferKeys(crumb_transfer* transfer, const void* keyspace_token,
                        size_t keyspace_token_bytes, const int32_t* tokens, size_t token_count,
                        const uint8_t* extra, size_t extra_pages, uint8_t* keys) {
  return TransferNextKeys(transfer, keyspace_token, keyspace_token_bytes, nullptr, tokens,
                          token_count, extra, extra_pages, keys);
}

crumb_code TransferNextKeys(crumb_transfer* transfer, const void* keyspace_token,
                            size_t keyspace_token_bytes, const uint8_t* parent,
                            const int32_t* tokens, size_t token_count, const uint8_t* extra,
                            size_t extra_pages, uint8_t* keys) {
  return Guarded([&]() -> absl::Status {
    if ((tokens == nullptr && token_count > 0) || (extra == nullptr && extra_pages > 0) ||
        (keys == nullptr && token_count >= CRUMB_PAGE_TOKENS)) {
      return Null("crumb_transfer_next_keys", "tokens, extra or keys");
    }
    PageKey previous;
    if (parent != nullptr) std::memcpy(&previous, parent, sizeof(previous));
    CRUMB_ASSIGN_OR_RETURN(
        const std::vector<PageKey> made,
        transfer->transfer->NextKeys(Bytes(keyspace_token, keyspace_token_bytes), previous,
                                     {tokens, token_count}, DigestsOf<Digest>(extra, extra_pages)));
    if (!made.empty()) std::memcpy(keys, made.data(), made.size() * sizeof(PageKey));
    return absl::OkStatus();
  });
}

crumb_code TransferAcquire(crumb_transfer* transfer, const void* keyspace_token,
                           size_t keyspace_token_bytes, const uint8_t* keys, size_t pages,
                           uint32_t deadline_ms, crumb_transfer_lease** out, size_t* hit_pages,
                           int32_t* tiers, crumb_miss* reason, void* token, size_t token_capacity,
                           size_t* token_bytes) {
  return Guarded([&]() -> absl::Status {
    if (out == nullptr || hit_pages == nullptr || (keys == nullptr && pages > 0)) {
      return Null("crumb_transfer_acquire", "keys, out or hit_pages");
    }
    CRUMB_ASSIGN_OR_RETURN(
        client::TransferPrefix prefix,
        transfer->transfer->Acquire(Bytes(keyspace_token, keyspace_token_bytes),
                                    DigestsOf<PageKey>(keys, pages), milliseconds(deadline_ms)));
    CRUMB_RETURN_IF_ERROR(
        WriteToken("crumb_transfer_acquire", prefix.token, token, token_capacity, token_bytes));
    *hit_pages = static_cast<size_t>(prefix.pages);
    if (tiers != nullptr) {
      std::transform(prefix.tiers.begin(), prefix.tiers.end(), tiers,
                     [](client::Tier tier) { return static_cast<int32_t>(tier); });
    }
    if (reason != nullptr) *reason = static_cast<crumb_miss>(prefix.miss_reason);
    *out = prefix.lease == nullptr ? nullptr
                                   : new crumb_transfer_lease{*transfer, std::move(prefix.lease)};
    return absl::OkStatus();
  });
}

void TransferLeaseClose(crumb_transfer_lease* lease) { delete lease; }

crumb_code PageLoadOpen(crumb_transfer* transfer, const void* token, size_t token_bytes,
                        const uint8_t* keys, size_t first_page, size_t end_page,
                        const int64_t* blocks, size_t block_count, uint32_t deadline_ms,
                        crumb_page_load** out, size_t* pages) {
  return Guarded([&]() -> absl::Status {
    constexpr const char* kFunction = "crumb_page_load_open";
    if (keys == nullptr || blocks == nullptr || out == nullptr || pages == nullptr) {
      return Null(kFunction, "keys, blocks, out or pages");
    }
    CRUMB_ASSIGN_OR_RETURN(const int first, PagesOf(kFunction, first_page));
    CRUMB_ASSIGN_OR_RETURN(const int end, PagesOf(kFunction, end_page));
    CRUMB_ASSIGN_OR_RETURN(
        auto load, transfer->transfer->StartLoad(Bytes(token, token_bytes),
                                                 DigestsOf<PageKey>(keys, end_page), first, end,
                                                 {blocks, block_count}, milliseconds(deadline_ms)));
    *pages = static_cast<size_t>(load->pages());
    *out = new crumb_page_load{*transfer, std::move(load)};
    return absl::OkStatus();
  });
}

crumb_code PageLoadLayers(crumb_page_load* load, uint32_t begin, uint32_t end) {
  return Guarded([&]() -> absl::Status {
    CRUMB_RETURN_IF_ERROR(load->load->LoadLayers(static_cast<int>(begin), static_cast<int>(end)));
    return load->load->Wait();
  });
}

crumb_code PageLoadEnqueue(crumb_page_load* load, uint32_t begin, uint32_t end, void* stream) {
  return Guarded([&] {
    return load->load->LoadLayers(static_cast<int>(begin), static_cast<int>(end),
                                  static_cast<client::DeviceStream>(stream));
  });
}

crumb_code PageLoadDone(crumb_page_load* load, uint32_t* done) {
  return Guarded([&]() -> absl::Status {
    if (done == nullptr) return Null("crumb_page_load_done", "done");
    CRUMB_ASSIGN_OR_RETURN(const bool all, load->load->Done());
    *done = all ? 1 : 0;
    return absl::OkStatus();
  });
}

crumb_code PageLoadWait(crumb_page_load* load) {
  return Guarded([&] { return load->load->Wait(); });
}

void PageLoadClose(crumb_page_load* load) { delete load; }

crumb_code PageStoreOpen(crumb_transfer* transfer, const void* keyspace_token,
                         size_t keyspace_token_bytes, const uint8_t* parent, size_t first_page,
                         const uint8_t* keys, size_t pages, const int64_t* blocks,
                         size_t block_count, uint32_t over_int2_prefix, crumb_page_store** out) {
  return Guarded([&]() -> absl::Status {
    constexpr const char* kFunction = "crumb_page_store_open";
    if (keys == nullptr || blocks == nullptr || out == nullptr) {
      return Null(kFunction, "keys, blocks or out");
    }
    CRUMB_ASSIGN_OR_RETURN(const int first, PagesOf(kFunction, first_page));
    CRUMB_RETURN_IF_ERROR(PagesOf(kFunction, pages).status());
    const std::vector<PageKey> named = DigestsOf<PageKey>(keys, pages);
    client::Transfer::StoreRequest request{.keyspace = Bytes(keyspace_token, keyspace_token_bytes),
                                           .keys = named,
                                           .parent = {},
                                           .first_page = first,
                                           .blocks = {blocks, block_count},
                                           .over_int2_prefix = over_int2_prefix != 0};
    if (parent != nullptr) request.parent = DigestsOf<PageKey>(parent, 1).front();
    CRUMB_ASSIGN_OR_RETURN(auto store, transfer->transfer->StartStore(request));
    *out = new crumb_page_store{*transfer, std::move(store)};
    return absl::OkStatus();
  });
}

crumb_code PageStoreLayers(crumb_page_store* store, uint32_t begin, uint32_t end) {
  return Guarded([&]() -> absl::Status {
    CRUMB_RETURN_IF_ERROR(
        store->store->StoreLayers(static_cast<int>(begin), static_cast<int>(end)));
    return store->store->Wait();
  });
}

crumb_code PageStoreEnqueue(crumb_page_store* store, uint32_t begin, uint32_t end, void* stream) {
  return Guarded([&] {
    return store->store->StoreLayers(static_cast<int>(begin), static_cast<int>(end),
                                     static_cast<client::DeviceStream>(stream));
  });
}

crumb_code PageStoreFinish(crumb_page_store* store) {
  return Guarded([&] { return store->store->Finish(); });
}

void PageStoreClose(crumb_page_store* store) { delete store; }

crumb_code TransferWaitPublished(crumb_transfer* transfer, uint32_t timeout_ms) {
  return Guarded([&] { return transfer->transfer->WaitPublished(milliseconds(timeout_ms)); });
}

crumb_code TransferReadCounters(crumb_transfer* transfer, crumb_worker_counters* out) {
  return Guarded([&] { return WriteCounters(transfer->transfer->counters(), out); });
}

}  // namespace crumb::c_api
