/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * Transfer: pages between crumbd and an engine's own paged KV cache.
 *
 * Since version 3. For engines that compute attention over a BF16 cache of their own: pages are
 * read from its blocks, quantized to INT2 (or kept in BF16, with history_bf16) and published, and
 * cached pages are written to its blocks as BF16 rows in the model's basis. A page has 64 tokens; a
 * block may have any number.
 *
 * The engine's scheduler names a keyspace, computes page keys and leases a prefix
 * (crumb_transfer_keyspace, _keys, _acquire). Its workers, which have the cache, copy the bytes
 * (crumb_page_load_*, crumb_page_store_*). Every process opens a transfer with the same
 * crumb_worker_options, except for the rank's part, and a client with the same `engine`. Tokens are
 * opaque bytes, at most CRUMB_LEAD_TOKEN_BYTES(tokens of the keys), which are valid between
 * processes of one version of the library. Transfers are thread-safe; a load or a store is used by
 * one thread at a time.
 */
#ifndef CRUMB_TRANSFER_H_
#define CRUMB_TRANSFER_H_

#include "crumb.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct crumb_transfer crumb_transfer;
typedef struct crumb_transfer_lease crumb_transfer_lease;
typedef struct crumb_page_load crumb_page_load;
typedef struct crumb_page_store crumb_page_store;

/* Types of the elements of an engine's rows. */
#define CRUMB_ROWS_BF16 0
#define CRUMB_ROWS_FP8_E4M3 1

/* The K or V rows of one layer. Element i of the row of token t in block b and KV head h
 * (counted from this rank's first) is base[b * block_stride + h * head_stride + t * token_stride +
 * i * element_stride]; strides are in elements. */
typedef struct crumb_paged_rows {
  void* base;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t element_stride;
} crumb_paged_rows;

/* A paged cache in this process's memory, or in that of a device. It must stay valid until the
 * transfer is closed. */
typedef struct crumb_paged_cache {
  size_t size;
  const crumb_paged_rows* k; /* [layers], those of this rank */
  const crumb_paged_rows* v; /* [layers] */
  uint32_t layers;
  uint32_t block_tokens;
  uint64_t blocks;
  /* Since version 4. The device whose addresses `k` and `v` have; NULL: they are host addresses.
   * On a device K and V of all layers have the same strides, element_stride is 1, rows are aligned
   * to 16 bytes, and block_tokens is at most 128. The transfer keeps the device open. */
  crumb_device* device;
  /* With a device: bytes of pinned host memory for stored pages until they are published; 0: 2 GiB.
   * Beside it the transfer allocates 256 MiB of device memory, or the size of five BF16 pages if
   * that is more, and the constants of the rotation. */
  uint64_t staging_bytes;
  /* Since version 9. The type of the elements of `k` and `v`, one of CRUMB_ROWS_*. An FP8 element
   * stands for its value times the factor of its layer, finite and greater than 0; NULL: 1. Rows of
   * pages are BF16: FP8 elements are rounded to BF16 when pages are stored, and BF16 elements
   * divided by the factor to FP8 when they are loaded. With a BF16 history an element that was
   * stored from FP8 is loaded as it was. */
  uint32_t element;
  const float* k_scale; /* [layers] */
  const float* v_scale; /* [layers] */
} crumb_paged_cache;

/* Takes the options of a worker; those about attention are not used. `client` must not be NULL.
 * CRUMB_INVALID_ARGUMENT names the option that is wrong. */
CRUMB_API crumb_code crumb_transfer_open(crumb_client* client, const crumb_worker_options* options,
                                         crumb_transfer** out);
/* Leases, loads and stores keep the transfer alive. `transfer` may be NULL. */
CRUMB_API void crumb_transfer_close(crumb_transfer* transfer);
/* Sets the cache for loads and stores that are opened later. With a device it blocks while memory
 * is pinned, about a second for each few GiB. */
CRUMB_API crumb_code crumb_transfer_use_cache(crumb_transfer* transfer,
                                              const crumb_paged_cache* cache);
/* Writes the token of the keyspace for requests that begin now; a request keeps its token. Opens
 * the keyspace again, within `timeout_ms`, if crumbd has restarted. Without crumbd it succeeds too:
 * the token then names a keyspace without cached pages. */
CRUMB_API crumb_code crumb_transfer_keyspace(crumb_transfer* transfer, uint32_t timeout_ms,
                                             void* token, size_t token_capacity,
                                             size_t* token_bytes);
/* Computes the keys of the full pages of a sequence. `extra` [extra_pages, 32] has digests of
 * everything else that leading pages depend on (cache salt, LoRA adapter, images), zeros for
 * nothing. keys [token_count / 64, 32] */
CRUMB_API crumb_code crumb_transfer_keys(crumb_transfer* transfer, const void* keyspace_token,
                                         size_t keyspace_token_bytes, const int32_t* tokens,
                                         size_t token_count, const uint8_t* extra,
                                         size_t extra_pages, uint8_t* keys);
/* Since version 8. Computes the keys of further full pages of a sequence: `tokens` and `extra`
 * start behind the page of key `parent` [32]. NULL: they start with the sequence, as in
 * crumb_transfer_keys. */
CRUMB_API crumb_code crumb_transfer_next_keys(crumb_transfer* transfer, const void* keyspace_token,
                                              size_t keyspace_token_bytes, const uint8_t* parent,
                                              const int32_t* tokens, size_t token_count,
                                              const uint8_t* extra, size_t extra_pages,
                                              uint8_t* keys);
/* Leases the longest prefix of keys [pages, 32] that crumbd has for all layers and heads, and
 * brings pages from SSD and other nodes to host memory within `deadline_ms` (0: pages of host
 * memory only). If there is none, or no crumbd, `hit_pages` is 0 and *out is NULL. tiers [pages] of
 * the hits, or NULL; `reason` of the first miss, or NULL. `token` names the prefix to
 * crumb_page_load_open; the lease must stay open until the loads are open. */
CRUMB_API crumb_code crumb_transfer_acquire(crumb_transfer* transfer, const void* keyspace_token,
                                            size_t keyspace_token_bytes, const uint8_t* keys,
                                            size_t pages, uint32_t deadline_ms,
                                            crumb_transfer_lease** out, size_t* hit_pages,
                                            int32_t* tiers, crumb_miss* reason, void* token,
                                            size_t token_capacity, size_t* token_bytes);
/* `lease` may be NULL. The pages may be evicted once this lease and all loads of the prefix are
 * closed. */
CRUMB_API void crumb_transfer_lease_close(crumb_transfer_lease* lease);

/* Starts to load pages [first_page, end_page) of a leased prefix. keys [end_page, 32] start with
 * page 0; blocks [block_count] is the sequence's block table, starting with its first token.
 * `pages` is the number of these pages that this process can load; a page that fails a check ends
 * them. */
CRUMB_API crumb_code crumb_page_load_open(crumb_transfer* transfer, const void* token,
                                          size_t token_bytes, const uint8_t* keys,
                                          size_t first_page, size_t end_page, const int64_t* blocks,
                                          size_t block_count, uint32_t deadline_ms,
                                          crumb_page_load** out, size_t* pages);
/* Writes the rows of layers [begin, end) of this rank into the cache. They are there on return.
 * CRUMB_OUT_OF_RANGE: there are no such layers. */
CRUMB_API crumb_code crumb_page_load_layers(crumb_page_load* load, uint32_t begin, uint32_t end);
/* Since version 4. Enqueues the same on `stream`, a cudaStream_t of the cache's device (NULL: its
 * default stream), and returns. With a cache in host memory it is crumb_page_load_layers. */
CRUMB_API crumb_code crumb_page_load_enqueue(crumb_page_load* load, uint32_t begin, uint32_t end,
                                             void* stream);
/* Sets *done to 1 if all enqueued rows are in the cache, else to 0. */
CRUMB_API crumb_code crumb_page_load_done(crumb_page_load* load, uint32_t* done);
/* Blocks until they are. */
CRUMB_API crumb_code crumb_page_load_wait(crumb_page_load* load);
/* Blocks until enqueued rows are in the cache. `load` may be NULL. */
CRUMB_API void crumb_page_load_close(crumb_page_load* load);

/* Starts to store `pages` pages from first_page on. keys [pages, 32]; parent [32] is the key of the
 * page in front of them, NULL if first_page is 0. over_int2_prefix is 1 if their rows were computed
 * over a prefix that was loaded from INT2 pages. CRUMB_RESOURCE_EXHAUSTED: pages that wait to be
 * published use up page_bytes_max, or staging_bytes. */
CRUMB_API crumb_code crumb_page_store_open(crumb_transfer* transfer, const void* keyspace_token,
                                           size_t keyspace_token_bytes, const uint8_t* parent,
                                           size_t first_page, const uint8_t* keys, size_t pages,
                                           const int64_t* blocks, size_t block_count,
                                           uint32_t over_int2_prefix, crumb_page_store** out);
/* Reads and quantizes the rows of layers [begin, end); the engine may overwrite them afterwards.
 * CRUMB_OUT_OF_RANGE: there are no such layers. */
CRUMB_API crumb_code crumb_page_store_layers(crumb_page_store* store, uint32_t begin, uint32_t end);
/* Since version 4. Enqueues the same on `stream`, a cudaStream_t of the cache's device (NULL: its
 * default stream), and returns. Work behind the call on `stream` may overwrite the rows. With a
 * cache in host memory it is crumb_page_store_layers. */
CRUMB_API crumb_code crumb_page_store_enqueue(crumb_page_store* store, uint32_t begin, uint32_t end,
                                              void* stream);
/* Queues the pages for publishing. The handle must still be closed. CRUMB_FAILED_PRECONDITION: a
 * layer was not stored. A page with a NaN or infinite element is left out and counted as refused.
 */
CRUMB_API crumb_code crumb_page_store_finish(crumb_page_store* store);
/* Pages that were not finished are dropped. `store` may be NULL. */
CRUMB_API void crumb_page_store_close(crumb_page_store* store);

/* Blocks until every page queued for publishing was published or dropped. */
CRUMB_API crumb_code crumb_transfer_wait_published(crumb_transfer* transfer, uint32_t timeout_ms);
/* Writes the members that out->size covers. Sequences and prompt tokens are those of
 * crumb_transfer_acquire; hits are counted there, failed checks where pages are loaded. */
CRUMB_API crumb_code crumb_transfer_read_counters(crumb_transfer* transfer,
                                                  crumb_worker_counters* out);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_TRANSFER_H_ */
