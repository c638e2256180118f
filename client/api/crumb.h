/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * The C interface of Crumb's client, in libcrumb.so, for engines that are not written in C++ and
 * for processes that have a gRPC or protobuf of their own: the library exports crumb_* only, and
 * loads its core, libcrumb_core.so, with the first call of a function that opens something.
 *
 * Handles are opaque. Functions return CRUMB_OK or a code; crumb_message() returns the error's
 * text for the calling thread. Every options struct begins with `size`, which the caller sets to
 * sizeof(struct), so that members can be added at the end. A member that is zero has its default.
 * Strings are copied, and no buffer is kept. Clients and workers are thread-safe; a sequence is
 * used by one thread at a time.
 */
#ifndef CRUMB_H_
#define CRUMB_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define CRUMB_API __attribute__((visibility("default")))
#else
#define CRUMB_API
#endif

#define CRUMB_ABI_VERSION 5
#define CRUMB_PAGE_TOKENS 64
#define CRUMB_KEY_BYTES 32

typedef int32_t crumb_code;
#define CRUMB_OK 0
#define CRUMB_INVALID_ARGUMENT 3   /* the caller's mistake */
#define CRUMB_DEADLINE_EXCEEDED 4  /* the outcome is unknown */
#define CRUMB_NOT_FOUND 5          /* there is no such file, or crumbd does not know the keyspace */
#define CRUMB_RESOURCE_EXHAUSTED 8 /* full; back off */
#define CRUMB_FAILED_PRECONDITION 9 /* do not retry */
#define CRUMB_ABORTED 10            /* the connection was lost; repeat the operation */
#define CRUMB_OUT_OF_RANGE 11       /* there is no such layer or page */
#define CRUMB_UNIMPLEMENTED 12
#define CRUMB_INTERNAL 13
#define CRUMB_UNAVAILABLE 14 /* there is no crumbd, or no libcrumb_core.so; retry */
#define CRUMB_DATA_LOSS 15   /* a checksum differs */

/* Returns the CRUMB_ABI_VERSION of the loaded library, which supports this header if the header's
 * version is not higher. Version 2 added device workers, version 3 statistics and transfers,
 * version 4 transfers of caches in device memory, version 5 attention over an engine's blocks. */
CRUMB_API uint32_t crumb_abi_version(void);
/* Returns the text of this thread's last error, or "". Valid until the thread's next call. */
CRUMB_API const char* crumb_message(void);

/* -- Client: a process's connection to crumbd ------------------------------------------------- */

typedef struct crumb_client crumb_client;

typedef struct crumb_client_options {
  size_t size;
  const char* socket_dir;   /* NULL: /run/crumb */
  const char* address;      /* "HOST:PORT" for gRPC over TCP, without shared memory */
  const char* process_name; /* name in crumbd's log */
  /* 16 random bytes that the engine's processes have in common; NULL: an engine of its own */
  const uint8_t* engine;
  uint64_t staging_bytes;      /* requested size; crumbd may grant less; 0: 64 MiB */
  uint32_t connect_timeout_ms; /* for one attempt; 0: 1,000 */
  uint32_t call_timeout_ms;    /* 0: 2,000 */
  /* PEM files for TLS to `address`; NULL or "": none. */
  const char* tls_ca_file;   /* verifies crumbd's certificate */
  const char* tls_cert_file; /* of this process, if crumbd verifies its callers */
  const char* tls_key_file;
  /* expected name in crumbd's certificate; NULL: the host of `address` */
  const char* tls_server_name;
  const char* token; /* identifies the tenant; NULL: none */
} crumb_client_options;

/* Makes one attempt to connect, which need not succeed; see crumb_client_connected. */
CRUMB_API crumb_code crumb_client_open(const crumb_client_options* options, crumb_client** out);
/* Workers and sequences that use the client keep it alive. `client` may be NULL. */
CRUMB_API void crumb_client_close(crumb_client* client);
CRUMB_API int crumb_client_connected(crumb_client* client);
/* CRUMB_UNAVAILABLE: there is no connection within the time. */
CRUMB_API crumb_code crumb_client_wait_connected(crumb_client* client, uint32_t timeout_ms);
/* Blocks until every page that was committed before is durable. The message of an error says how
 * many pages are not durable, and why. `durable_pages` may be NULL. */
CRUMB_API crumb_code crumb_client_flush(crumb_client* client, uint32_t timeout_ms,
                                        uint64_t* durable_pages);

/* Receives one value of crumb_client_read_stats as text, which is valid during the call. */
typedef void (*crumb_stat_receiver)(void* context, const char* name, const char* value);

/* Since version 3. Reads crumbd's present statistics and passes each value to `receiver`: version,
 * node_id, uptime_seconds, sessions, leases, reservations, keyspaces; tier.NAME.pages and so on;
 * lookup_tokens.NAME; and crumbd's counters by their names. */
CRUMB_API crumb_code crumb_client_read_stats(crumb_client* client, crumb_stat_receiver receiver,
                                             void* context);

/* -- Pages by key: for engines that keep their own KV cache ----------------------------------- */

typedef struct crumb_keyspace_spec {
  size_t size;
  const char* const* names; /* [fields], see docs/formats/keyspace.md */
  const char* const* values;
  size_t fields;
  uint32_t layers;
  uint32_t kv_heads;
  uint32_t head_dim;
  uint32_t group_size;
  const char* tenant; /* NULL: the default tenant */
} crumb_keyspace_spec;

typedef struct crumb_keyspace {
  uint8_t id[CRUMB_KEY_BYTES];
  uint64_t generation;
  uint32_t int2_tile_bytes;
  uint32_t bf16_tile_bytes;
  uint32_t serves_bf16_only; /* 1: INT2 pages are switched off */
} crumb_keyspace;

CRUMB_API crumb_code crumb_keyspace_open(crumb_client* client, const crumb_keyspace_spec* spec,
                                         uint32_t timeout_ms, crumb_keyspace* out);

/* Computes the keys of the full pages of a sequence. keyspace [32]; keys [token_count / 64, 32] */
CRUMB_API crumb_code crumb_page_keys(const uint8_t* keyspace, const int32_t* tokens,
                                     size_t token_count, uint8_t* keys);
/* Computes the key of a page that the engine identifies by other bytes. key [32] */
CRUMB_API crumb_code crumb_foreign_key(const uint8_t* keyspace, const void* name, size_t name_bytes,
                                       uint8_t* key);

/* Why a page was not served. */
typedef int32_t crumb_miss;
#define CRUMB_MISS_NONE 0
#define CRUMB_MISS_ABSENT 1
#define CRUMB_MISS_PENDING 2
#define CRUMB_MISS_DEADLINE 3
#define CRUMB_MISS_CORRUPT 4
#define CRUMB_MISS_GENERATION 5
#define CRUMB_MISS_QUALITY 6
#define CRUMB_MISS_NOT_COVERED 7
#define CRUMB_MISS_BUSY 8
#define CRUMB_MISS_UNAVAILABLE 64

/* The tier in which a page was found. */
#define CRUMB_TIER_UNKNOWN 0
#define CRUMB_TIER_DEVICE 1
#define CRUMB_TIER_HOST 2
#define CRUMB_TIER_SSD 3
#define CRUMB_TIER_REMOTE 4

/* Returns the number of leading pages that are cached. keys [pages, 32]; tiers [pages] of the hits,
 * or NULL; `reason` says why the first page behind the hits is a miss, or NULL. */
CRUMB_API crumb_code crumb_lookup(crumb_client* client, const uint8_t* keyspace,
                                  const uint8_t* keys, size_t pages, size_t* hits, int32_t* tiers,
                                  crumb_miss* reason);

/* A fragment: the tiles of a range of layers and KV heads of one page, layer by layer. */
typedef struct crumb_fragment {
  uint8_t key[CRUMB_KEY_BYTES];
  uint8_t parent[CRUMB_KEY_BYTES]; /* zeros for the first page of a sequence */
  uint32_t format;                 /* 1: BF16, 2: INT2 */
  uint32_t over_int2_prefix;       /* 1: its rows were computed while INT2 pages were attended */
  uint32_t layer_begin, layer_end;
  uint32_t head_begin, head_end;
  const void* tiles;
  size_t tiles_bytes;
} crumb_fragment;

/* Receives a fragment of page `page` of a crumb_get; it is valid during the call. A result other
 * than 0 ends the get. */
typedef int (*crumb_receiver)(void* context, size_t page, const crumb_fragment* fragment);

/* Reads the pages up to the first miss; key, keyspace and checksums of each are verified. */
CRUMB_API crumb_code crumb_get(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys,
                               size_t pages, uint32_t timeout_ms, crumb_receiver receiver,
                               void* context, crumb_miss* reason);

/* The outcome of writing one fragment. */
#define CRUMB_PUT_STORED 1
#define CRUMB_PUT_DEDUPLICATED 2 /* the tiles are in the cache already */
#define CRUMB_PUT_REFUSED 3      /* the key, size or generation is wrong */
#define CRUMB_PUT_NO_ROOM 4

/* Writes fragments, whose checksums it computes. outcomes [count] CRUMB_PUT_*. */
CRUMB_API crumb_code crumb_put(crumb_client* client, const crumb_keyspace* keyspace,
                               const crumb_fragment* fragments, size_t count, uint32_t timeout_ms,
                               int32_t* outcomes);

/* -- Worker and sequence: the KV cache itself ------------------------------------------------- */

typedef struct crumb_worker crumb_worker;
typedef struct crumb_sequence crumb_sequence;

/* Runs body(argument, 0 .. count - 1) on any threads and returns when all have finished. */
typedef void (*crumb_parallel_for)(void* context, int32_t count,
                                   void (*body)(void* argument, int32_t index), void* argument);

typedef struct crumb_worker_options {
  size_t size;
  const char* model;   /* a name for people and metrics */
  const char* weights; /* digest of the checkpoint, or the engine's weight version */
  uint32_t layers;
  uint32_t kv_heads;
  uint32_t q_heads;
  uint32_t head_dim;
  uint32_t group_size;      /* 0: the lesser of 128 and head_dim */
  uint32_t history_bf16;    /* 1: history pages stay BF16 */
  const char* rotation;     /* a rotation file, "hadamard" or "identity"; NULL: "hadamard" */
  const char* rope;         /* effective RoPE configuration, as the engine writes it */
  uint32_t prefill_block;   /* 0: 8,192 */
  const char* tenant;       /* NULL: the default tenant */
  const char* const* names; /* [fields] further keyspace fields */
  const char* const* values;
  size_t fields;
  uint32_t recent_tokens;          /* 0: 256 */
  float scale;                     /* factor of q.k; 0: 1 / sqrt(head_dim) */
  float soft_cap;                  /* 0: none */
  uint64_t page_bytes_max;         /* private memory for pages; 0: 16 GiB */
  uint32_t begin_deadline_ms;      /* 0: 200 */
  crumb_parallel_for parallel_for; /* NULL: the calling thread does all of the work */
  void* parallel_context;
  /* This rank's part of the layers and heads above, as half-open ranges; zeros: all. k, v and q of
   * its sequences have its heads only, and layers count from layer_begin. crumb_rank_part sets
   * these members. */
  uint32_t layer_begin, layer_end;
  uint32_t head_begin, head_end;     /* KV heads */
  uint32_t q_head_begin, q_head_end; /* zeros: all query heads of those KV heads */
  uint32_t publishes_nothing;        /* 1: another rank publishes the same tiles */
} crumb_worker_options;

/* Sets the part of a rank in `options`, whose layers, kv_heads and q_heads are the model's. Layers
 * are cut into consecutive pipeline stages of equal size; if they do not divide, the first stages
 * have one layer more. Heads are divided equally; with more ranks than KV heads, neighbours hold
 * the same KV head. */
CRUMB_API crumb_code crumb_rank_part(crumb_worker_options* options, uint32_t tp_rank,
                                     uint32_t tp_size, uint32_t pp_rank, uint32_t pp_size);

/* `client` may be NULL, which means no crumbd. */
CRUMB_API crumb_code crumb_worker_open(crumb_client* client, const crumb_worker_options* options,
                                       crumb_worker** out);
/* Sequences keep the worker alive. `worker` may be NULL. */
CRUMB_API void crumb_worker_close(crumb_worker* worker);
/* Blocks until every page queued for publishing was published or dropped. */
CRUMB_API crumb_code crumb_worker_wait_published(crumb_worker* worker, uint32_t timeout_ms);

typedef struct crumb_worker_counters {
  size_t size; /* set by the caller; members beyond it are not written */
  uint64_t sequences;
  uint64_t prompt_tokens;
  uint64_t hit_tokens_worker;
  uint64_t hit_tokens_host;
  uint64_t hit_tokens_ssd;
  uint64_t hit_tokens_remote;
  uint64_t verify_failures;
  uint64_t deadline_exceeded;
  uint64_t unavailable;
  uint64_t windows_evicted;
  uint64_t windows_refused;
  uint64_t published_pages;
  uint64_t deduplicated_pages;
  uint64_t publish_refused;
  uint64_t publish_dropped;
  uint64_t windows_measured;
  uint64_t quality_alarms;
  uint64_t hit_tokens_device; /* since version 2 */
  uint64_t pool_pages;
} crumb_worker_counters;

CRUMB_API crumb_code crumb_worker_read_counters(crumb_worker* worker, crumb_worker_counters* out);

typedef struct crumb_sequence_options {
  size_t size;
  /* [extra_pages, 32], digests of everything else that leading pages depend on */
  const uint8_t* extra;
  size_t extra_pages;
  uint32_t publish;          /* 0: all pages, 1: pages of the prompt, 2: none */
  uint32_t deadline_ms;      /* 0: the worker's; set host_memory_only to wait for nothing */
  uint32_t host_memory_only; /* 1: use pages of this worker and of host memory only */
  /* The cache may supply cached_tokens_max_plus_one - 1 leading prompt tokens; 0: no maximum. */
  uint32_t cached_tokens_max_plus_one;
} crumb_sequence_options;

/* Begins a request, whose `cached_tokens` leading prompt tokens need not be computed. `options` may
 * be NULL. A late or failed fetch is a miss, not an error. */
CRUMB_API crumb_code crumb_sequence_begin(crumb_worker* worker, const int32_t* tokens, size_t count,
                                          const crumb_sequence_options* options,
                                          crumb_sequence** out, uint32_t* cached_tokens);
/* These begin a request in an engine of several ranks: one rank leads and takes the longest prefix
 * that is cached for all layers and heads; the others follow with its token and the same tokens and
 * options, and get the same prefix. `token` has room for `token_capacity` bytes;
 * CRUMB_LEAD_TOKEN_BYTES(count) suffice. CRUMB_ABORTED from crumb_sequence_follow: this rank cannot
 * have all of the prefix; lead again with the cached_tokens_max that the message names. */
#define CRUMB_LEAD_TOKEN_BYTES(tokens) (256 + (tokens) / CRUMB_PAGE_TOKENS)
CRUMB_API crumb_code crumb_sequence_lead(crumb_worker* worker, const int32_t* tokens, size_t count,
                                         const crumb_sequence_options* options,
                                         crumb_sequence** out, uint32_t* cached_tokens, void* token,
                                         size_t token_capacity, size_t* token_bytes);
CRUMB_API crumb_code crumb_sequence_follow(crumb_worker* worker, const void* token,
                                           size_t token_bytes, const int32_t* tokens, size_t count,
                                           const crumb_sequence_options* options,
                                           crumb_sequence** out, uint32_t* cached_tokens);
/* Stores k, v [tokens, kv_heads, head_dim] bf16 of one layer, after QK-norm and RoPE. */
CRUMB_API crumb_code crumb_sequence_append(crumb_sequence* sequence, uint32_t layer,
                                           uint32_t tokens, const void* k, const void* v);
/* Computes attention. q [tokens, q_heads, head_dim] bf16; out [tokens, q_heads, head_dim] f32. */
CRUMB_API crumb_code crumb_sequence_attend(crumb_sequence* sequence, uint32_t layer,
                                           uint32_t tokens, const void* q, float* out);
/* Ends a pass: `tokens` become part of the sequence, the pass's other tokens are dropped. */
CRUMB_API crumb_code crumb_sequence_advance(crumb_sequence* sequence, const int32_t* tokens,
                                            size_t count);
CRUMB_API crumb_code crumb_sequence_fork(const crumb_sequence* sequence, crumb_sequence** out);
/* Publishes every full page. The handle must still be closed. */
CRUMB_API crumb_code crumb_sequence_finish(crumb_sequence* sequence);
/* Without crumb_sequence_finish, pages in the recent window are lost. `sequence` may be NULL. */
CRUMB_API void crumb_sequence_close(crumb_sequence* sequence);
CRUMB_API uint32_t crumb_sequence_length(const crumb_sequence* sequence);

/* -- Transfer: pages between crumbd and an engine's own paged KV cache ------------------------ */

/* Since version 3. For engines that compute attention over a BF16 cache of their own: pages are
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
 * one thread at a time. */

typedef struct crumb_transfer crumb_transfer;
typedef struct crumb_transfer_lease crumb_transfer_lease;
typedef struct crumb_page_load crumb_page_load;
typedef struct crumb_page_store crumb_page_store;

/* The K or V rows of one layer, in BF16. Element i of the row of token t in block b and KV head h
 * (counted from this rank's first) is base[b * block_stride + h * head_stride + t * token_stride +
 * i * element_stride]; strides are in elements. */
typedef struct crumb_paged_rows {
  void* base;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t element_stride;
} crumb_paged_rows;

/* A device, as crumb_device_open opens it. */
typedef struct crumb_device crumb_device;

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
} crumb_paged_cache;

/* Takes the options of a worker; those about attention are not used. */
CRUMB_API crumb_code crumb_transfer_open(crumb_client* client, const crumb_worker_options* options,
                                         crumb_transfer** out);
/* Leases, loads and stores keep the transfer alive. `transfer` may be NULL. */
CRUMB_API void crumb_transfer_close(crumb_transfer* transfer);
/* Sets the cache for loads and stores that are opened later. With a device it blocks while memory
 * is pinned, about a second for each few GiB. */
CRUMB_API crumb_code crumb_transfer_use_cache(crumb_transfer* transfer,
                                              const crumb_paged_cache* cache);
/* Writes the token of the keyspace for requests that begin now; a request keeps its token. Opens
 * the keyspace again, within `timeout_ms`, if crumbd has restarted. */
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
/* `lease` may be NULL. */
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
/* Writes the rows of layers [begin, end) of this rank into the cache. They are there on return. */
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
/* Reads and quantizes the rows of layers [begin, end); the engine may overwrite them afterwards. */
CRUMB_API crumb_code crumb_page_store_layers(crumb_page_store* store, uint32_t begin, uint32_t end);
/* Since version 4. Enqueues the same on `stream`, a cudaStream_t of the cache's device (NULL: its
 * default stream), and returns. Work behind the call on `stream` may overwrite the rows. With a
 * cache in host memory it is crumb_page_store_layers. */
CRUMB_API crumb_code crumb_page_store_enqueue(crumb_page_store* store, uint32_t begin, uint32_t end,
                                              void* stream);
/* Queues the pages for publishing. The handle must still be closed. CRUMB_FAILED_PRECONDITION: a
 * layer was not stored. */
CRUMB_API crumb_code crumb_page_store_finish(crumb_page_store* store);
/* Pages that were not finished are dropped. `store` may be NULL. */
CRUMB_API void crumb_page_store_close(crumb_page_store* store);

/* Blocks until every page queued for publishing was published or dropped. */
CRUMB_API crumb_code crumb_transfer_wait_published(crumb_transfer* transfer, uint32_t timeout_ms);
CRUMB_API crumb_code crumb_transfer_read_counters(crumb_transfer* transfer,
                                                  crumb_worker_counters* out);

/* -- Blocks: attention for engines that allocate INT2 blocks themselves ----------------------- */

/* Since version 5. For engines whose own block pool holds the INT2 tiles. All blocks have one size:
 * per layer, an INT2 tile for each KV head. A history block holds the tiles of 64 tokens, and is
 * the fragment that crumbd stores. Beside them a request has a fixed number of blocks for BF16
 * rows: of its first 64 tokens (sink blocks) and of its latest (recent blocks). No state is kept
 * outside of the blocks.
 *
 * The token at position p attends the first 64 tokens in BF16, positions up to the last multiple of
 * 64 that is at least recent_tokens (256) back in INT2, and BF16 rows behind it, in prompts and in
 * decoding alike: results do not depend on how a prompt is cut into chunks. The tile of a window is
 * written when its 64 tokens are complete.
 *
 * The first recent block of a new request must be zero. A request may begin with a number of
 * computed tokens that is a multiple of 64 (a prefix hit): their history blocks and all sink blocks
 * are valid then, and all of them except the sink are attended in INT2. */

typedef struct crumb_block_attention crumb_block_attention;

typedef struct crumb_block_geometry {
  size_t size;             /* set by the caller; members beyond it are not written */
  uint32_t tile_bytes;     /* of 64 tokens of one KV head, K and V */
  uint32_t rows_per_block; /* BF16 rows (K and V) for each KV head that a block has room for */
  uint32_t sink_blocks;    /* per request */
  uint32_t recent_blocks;  /* per request */
} crumb_block_geometry;

/* Computes the geometry from head_dim, group_size and recent_tokens. */
CRUMB_API crumb_code crumb_block_geometry_of(const crumb_worker_options* options,
                                             crumb_block_geometry* out);
/* Takes the options of a worker; those about pages and publishing are not used. */
CRUMB_API crumb_code crumb_block_attention_open(const crumb_worker_options* options,
                                                crumb_block_attention** out);
/* `attention` may be NULL. */
CRUMB_API void crumb_block_attention_close(crumb_block_attention* attention);

/* One layer's part of the pool: block b of a group begins at its base + b * block_stride bytes. The
 * groups may share their memory. */
typedef struct crumb_block_pool {
  size_t size;
  void* history;
  void* sink;
  void* recent;
  int64_t block_stride;
  uint64_t blocks;
} crumb_block_pool;

/* The requests of one step. Block ids of request s begin at table + s * stride. */
typedef struct crumb_block_batch {
  size_t size;
  uint32_t requests;
  const int32_t* query_start; /* [requests + 1] first fresh token of each request */
  const int32_t* lengths;     /* [requests] tokens with the fresh ones */
  const int32_t* history;     /* tables */
  const int32_t* sink;
  const int32_t* recent;
  int64_t history_stride; /* entries */
  int64_t sink_stride;
  int64_t recent_stride;
} crumb_block_batch;

/* The fresh tokens of all requests, in bf16. q, out [tokens, q_heads, head_dim]; k, v [tokens,
 * kv_heads, head_dim]. Strides are elements between two tokens. */
typedef struct crumb_block_rows {
  size_t size;
  const void* q;
  const void* k;
  const void* v;
  void* out;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t out_stride;
} crumb_block_rows;

/* Stores the rows of one layer of a step and computes the attention of its fresh tokens, in host
 * memory and on the calling thread (or with parallel_for). Thread-safe for calls that have no block
 * in common. CRUMB_INVALID_ARGUMENT: a block id is outside the pool, or there are too few;
 * CRUMB_FAILED_PRECONDITION: rows of earlier tokens are missing, because a first recent block was
 * not zero. */
CRUMB_API crumb_code crumb_block_attend(crumb_block_attention* attention, uint32_t layer,
                                        const crumb_block_pool* pool,
                                        const crumb_block_batch* batch,
                                        const crumb_block_rows* rows);

/* -- Device worker: the KV cache in the memory of one GPU ------------------------------------- */

/* Since version 2. As the worker above, for batches of sequences: all pointers to rows are device
 * pointers, and everything is enqueued on the batch's stream. Streams and pointers of the engine in
 * the same process can be used. Workers are thread-safe; a batch, and the sequences in its pass,
 * are used by one thread at a time. */

typedef struct crumb_device_worker crumb_device_worker;
typedef struct crumb_device_sequence crumb_device_sequence;
typedef struct crumb_device_batch crumb_device_batch;

/* Opens device `ordinal` of a back end, which must be "cuda". CRUMB_UNAVAILABLE: there is no
 * driver, or no such device; CRUMB_FAILED_PRECONDITION: the library was built without the back end.
 */
CRUMB_API crumb_code crumb_device_open(const char* back_end, uint32_t ordinal, crumb_device** out);
/* Workers keep the device alive. `device` may be NULL. */
CRUMB_API void crumb_device_close(crumb_device* device);

typedef struct crumb_device_worker_options {
  size_t size;
  uint32_t pages;            /* private INT2 pages; 0: 4,096 */
  uint32_t sequences;        /* sequences that hold tokens at once; 0: 64 */
  uint32_t prompts;          /* sequences inside their prompt at once; 0: 2 */
  uint32_t loads;            /* prefixes that are copied to the device at once; 0: 4 */
  uint32_t load_pages;       /* pages of one such prefix; 0: 2,048 */
  uint32_t passes_in_flight; /* passes of a batch that may be queued on its stream; 0: 4 */
  uint32_t draft_slots;      /* tokens of a decode pass besides the first; 0: 7 */
  uint64_t pin_piece_bytes;  /* step in which crumbd's memory is pinned; 0: 256 MiB */
  uint32_t pins_nothing;     /* 1: crumbd's memory is not pinned */
  /* Device pools, which all workers of a tenant use; pool_bytes 0: none. */
  /* 1: pages are copied to crumbd's memory only if their slots are needed */
  uint32_t pool_copies_late;
  uint64_t pool_bytes;
  uint64_t pool_sink_bytes;   /* 0: 256 MiB */
  uint64_t pool_handle_bytes; /* 0: 256 MiB */
  uint32_t pool_blank_pages;  /* 0: 256 */
  uint32_t pool_blank_sinks;  /* 0: 4 */
  /* [pool_peer_count] ordinals of devices from whose pools pages are copied */
  const uint32_t* pool_peers;
  size_t pool_peer_count;
  /* BF16 history pages, for use after INT2 was given up; allocated when they are needed; 0: 512. */
  uint32_t bf16_pages;
} crumb_device_worker_options;

/* `client` may be NULL, which means no crumbd; `device_options` may be NULL. parallel_for and
 * page_bytes_max of `options` are not used. CRUMB_RESOURCE_EXHAUSTED: there is too little device
 * memory. */
CRUMB_API crumb_code crumb_device_worker_open(crumb_client* client, crumb_device* device,
                                              const crumb_worker_options* options,
                                              const crumb_device_worker_options* device_options,
                                              crumb_device_worker** out);
/* Sequences and batches keep the worker alive. `worker` may be NULL. */
CRUMB_API void crumb_device_worker_close(crumb_device_worker* worker);
CRUMB_API crumb_code crumb_device_worker_wait_published(crumb_device_worker* worker,
                                                        uint32_t timeout_ms);
CRUMB_API crumb_code crumb_device_worker_read_counters(crumb_device_worker* worker,
                                                       crumb_worker_counters* out);

/* As crumb_sequence_begin, _lead and _follow. Cached pages may still be in flight when these
 * return; the batch waits for them on its stream. */
CRUMB_API crumb_code crumb_device_sequence_begin(crumb_device_worker* worker, const int32_t* tokens,
                                                 size_t count,
                                                 const crumb_sequence_options* options,
                                                 crumb_device_sequence** out,
                                                 uint32_t* cached_tokens);
CRUMB_API crumb_code crumb_device_sequence_lead(crumb_device_worker* worker, const int32_t* tokens,
                                                size_t count, const crumb_sequence_options* options,
                                                crumb_device_sequence** out,
                                                uint32_t* cached_tokens, void* token,
                                                size_t token_capacity, size_t* token_bytes);
CRUMB_API crumb_code crumb_device_sequence_follow(crumb_device_worker* worker, const void* token,
                                                  size_t token_bytes, const int32_t* tokens,
                                                  size_t count,
                                                  const crumb_sequence_options* options,
                                                  crumb_device_sequence** out,
                                                  uint32_t* cached_tokens);
/* Called between passes. `sequence` may be NULL. */
CRUMB_API void crumb_device_sequence_close(crumb_device_sequence* sequence);
CRUMB_API uint32_t crumb_device_sequence_length(const crumb_device_sequence* sequence);
/* Returns the maximum number of tokens in its next pass. */
CRUMB_API uint32_t crumb_device_sequence_pass_tokens_max(const crumb_device_sequence* sequence);

typedef struct crumb_device_batch_options {
  size_t size;
  void* stream; /* the engine's cudaStream_t; NULL: the default stream */
  uint32_t
      prompts; /* 1: passes bring chunks of prompts; 0: the next tokens of decoding sequences */
  uint32_t sequences; /* capacity of a pass; 0: 1 */
  uint32_t tokens;    /* decode: tokens of every sequence; prompts: maximum of one sequence; 0: 1 */
  uint32_t pages;     /* maximum of one sequence; 0: 2,048 */
  uint32_t output_f32; /* 1: attention writes f32; 0: bf16 */
} crumb_device_batch_options;

CRUMB_API crumb_code crumb_device_batch_open(crumb_device_worker* worker,
                                             const crumb_device_batch_options* options,
                                             crumb_device_batch** out);
/* Blocks until the passes on the stream are done. `batch` may be NULL. */
CRUMB_API void crumb_device_batch_close(crumb_device_batch* batch);

typedef struct crumb_pass_entry {
  crumb_device_sequence* sequence;
  uint32_t tokens; /* fresh tokens; decode: the batch's number */
} crumb_pass_entry;

/* A pass calls prepare, start, append and attend of every layer, and advance. In a decode batch the
 * calls between prepare and advance may be captured into a CUDA graph once and launched for every
 * pass. CRUMB_RESOURCE_EXHAUSTED: there is no room in device memory; nothing has changed. */
CRUMB_API crumb_code crumb_device_batch_prepare(crumb_device_batch* batch,
                                                const crumb_pass_entry* entries, size_t count);
CRUMB_API crumb_code crumb_device_batch_start(crumb_device_batch* batch);
/* k, v device [sequences, tokens, kv_heads, head_dim] bf16; for prompts [all fresh tokens, ...] */
CRUMB_API crumb_code crumb_device_batch_append(crumb_device_batch* batch, uint32_t layer,
                                               const void* k, const void* v);
/* q, out device [sequences, tokens, q_heads, head_dim]; for prompts [all fresh tokens, ...] */
CRUMB_API crumb_code crumb_device_batch_attend(crumb_device_batch* batch, uint32_t layer,
                                               const void* q, void* out);
/* Ends the pass. The first counts[i] fresh tokens of entry i stay; they are the next counts[i]
 * elements of `tokens`. CRUMB_DATA_LOSS: cached pages of the sequences that the message names are
 * damaged. */
CRUMB_API crumb_code crumb_device_batch_advance(crumb_device_batch* batch, const int32_t* tokens,
                                                const uint32_t* counts, size_t entries);
CRUMB_API crumb_code crumb_device_batch_fork(crumb_device_batch* batch,
                                             crumb_device_sequence* sequence,
                                             crumb_device_sequence** out);
/* Publishes every full page. The handle must still be closed. */
CRUMB_API crumb_code crumb_device_batch_finish(crumb_device_batch* batch,
                                               crumb_device_sequence* sequence);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_H_ */
