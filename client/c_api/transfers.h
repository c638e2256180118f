// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb_transfer.h"

// Implements the functions of crumb_transfer.h for transfers.
namespace crumb::c_api {

crumb_code TransferOpen(crumb_client* client, const crumb_worker_options* options,
                        crumb_transfer** out);
void TransferClose(crumb_transfer* transfer);
crumb_code TransferUseCache(crumb_transfer* transfer, const crumb_paged_cache* cache);
crumb_code TransferKeyspace(crumb_transfer* transfer, uint32_t timeout_ms, void* token,
                            size_t token_capacity, size_t* token_bytes);
crumb_code TransferKeys(crumb_transfer* transfer, const void* keyspace_token,
                        size_t keyspace_token_bytes, const int32_t* tokens, size_t token_count,
                        const uint8_t* extra, size_t extra_pages, uint8_t* keys);
crumb_code TransferNextKeys(crumb_transfer* transfer, const void* keyspace_token,
                            size_t keyspace_token_bytes, const uint8_t* parent,
                            const int32_t* tokens, size_t token_count, const uint8_t* extra,
                            size_t extra_pages, uint8_t* keys);
crumb_code TransferAcquire(crumb_transfer* transfer, const void* keyspace_token,
                           size_t keyspace_token_bytes, const uint8_t* keys, size_t pages,
                           uint32_t deadline_ms, crumb_transfer_lease** out, size_t* hit_pages,
                           int32_t* tiers, crumb_miss* reason, void* token, size_t token_capacity,
                           size_t* token_bytes);
void TransferLeaseClose(crumb_transfer_lease* lease);
crumb_code PageLoadOpen(crumb_transfer* transfer, const void* token, size_t token_bytes,
                        const uint8_t* keys, size_t first_page, size_t end_page,
                        const int64_t* blocks, size_t block_count, uint32_t deadline_ms,
                        crumb_page_load** out, size_t* pages);
crumb_code PageLoadLayers(crumb_page_load* load, uint32_t begin, uint32_t end);
crumb_code PageLoadEnqueue(crumb_page_load* load, uint32_t begin, uint32_t end, void* stream);
crumb_code PageLoadDone(crumb_page_load* load, uint32_t* done);
crumb_code PageLoadWait(crumb_page_load* load);
void PageLoadClose(crumb_page_load* load);
crumb_code PageStoreOpen(crumb_transfer* transfer, const void* keyspace_token,
                         size_t keyspace_token_bytes, const uint8_t* parent, size_t first_page,
                         const uint8_t* keys, size_t pages, const int64_t* blocks,
                         size_t block_count, uint32_t over_int2_prefix, crumb_page_store** out);
crumb_code PageStoreLayers(crumb_page_store* store, uint32_t begin, uint32_t end);
crumb_code PageStoreEnqueue(crumb_page_store* store, uint32_t begin, uint32_t end, void* stream);
crumb_code PageStoreFinish(crumb_page_store* store);
void PageStoreClose(crumb_page_store* store);
crumb_code TransferWaitPublished(crumb_transfer* transfer, uint32_t timeout_ms);
crumb_code TransferReadCounters(crumb_transfer* transfer, crumb_worker_counters* out);

}  // namespace crumb::c_api
