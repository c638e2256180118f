/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * The C interface of Crumb's client, in libcrumb.so. For engines that are not written in C++, and
 * for processes that carry a gRPC or protobuf of their own: the library exports crumb_* only, and
 * loads what it is made of when the first crumb_client_open or crumb_worker_open is called.
 *
 * Handles are opaque. Functions answer CRUMB_OK or a code; crumb_message() then says what was
 * wrong, for the calling thread. Every options struct begins with `size`, which the caller sets to
 * sizeof(struct): members may be added at the end. A member that is zero takes its default. Strings
 * are copied, buffers are not kept. Clients and workers are thread-safe; a sequence is used by one
 * thread at a time.
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

#define CRUMB_ABI_VERSION 3
#define CRUMB_PAGE_TOKENS 64
#define CRUMB_KEY_BYTES 32

typedef int32_t crumb_code;
#define CRUMB_OK 0
#define CRUMB_INVALID_ARGUMENT 3    /* the caller's mistake */
#define CRUMB_DEADLINE_EXCEEDED 4   /* outcome unknown */
#define CRUMB_NOT_FOUND 5           /* no such file, or a keyspace that crumbd does not know */
#define CRUMB_RESOURCE_EXHAUSTED 8  /* full: back off */
#define CRUMB_FAILED_PRECONDITION 9 /* do not retry */
#define CRUMB_ABORTED 10            /* the connection was lost: redo */
#define CRUMB_OUT_OF_RANGE 11       /* a layer or page that is not there */
#define CRUMB_UNIMPLEMENTED 12
#define CRUMB_INTERNAL 13
#define CRUMB_UNAVAILABLE 14 /* no crumbd, or the library's other half is not there: retry */
#define CRUMB_DATA_LOSS 15   /* a checksum differed */

/* CRUMB_ABI_VERSION of the library that is loaded: it has what this header says if the header's is
 * not higher. 2: device workers. 3: statistics and transfers. */
CRUMB_API uint32_t crumb_abi_version(void);
/* What the last failed call of this thread had to say; "" before. Valid until the next call. */
CRUMB_API const char* crumb_message(void);

/* -- Client: a process's connection to crumbd ------------------------------------------------- */

typedef struct crumb_client crumb_client;

typedef struct crumb_client_options {
  size_t size;
  const char* socket_dir;      /* NULL: /run/crumb */
  const char* address;         /* "HOST:PORT": gRPC over TCP, without shared memory */
  const char* process_name;    /* for crumbd's log */
  const uint8_t* engine;       /* 16 random bytes that its processes agreed on; NULL: its own */
  uint64_t staging_bytes;      /* wanted; 0: 64 MiB */
  uint32_t connect_timeout_ms; /* of one attempt; 0: 1,000 */
  uint32_t call_timeout_ms;    /* 0: 2,000 */
  /* PEM files for TLS to `address`; NULL or "": none. */
  const char* tls_ca_file;   /* that crumbd is checked with */
  const char* tls_cert_file; /* of this process, where crumbd checks its callers */
  const char* tls_key_file;
  const char* tls_server_name; /* that crumbd's certificate carries; NULL: the address's host */
  const char* token;           /* of the tenant; NULL: none */
} crumb_client_options;

/* Makes one attempt to connect, which need not succeed: crumb_client_connected tells. */
CRUMB_API crumb_code crumb_client_open(const crumb_client_options* options, crumb_client** out);
/* Workers and sequences made with the client keep it alive. NULL is allowed. */
CRUMB_API void crumb_client_close(crumb_client* client);
CRUMB_API int crumb_client_connected(crumb_client* client);
/* CRUMB_UNAVAILABLE: no connection within the time. */
CRUMB_API crumb_code crumb_client_wait_connected(crumb_client* client, uint32_t timeout_ms);
/* Waits until all that was committed before is durable. An error's message names how many pages are
 * not, and why. `durable_pages` may be NULL. */
CRUMB_API crumb_code crumb_client_flush(crumb_client* client, uint32_t timeout_ms,
                                        uint64_t* durable_pages);

/* Takes one figure of crumb_client_read_stats as text, valid during the call. */
typedef void (*crumb_stat_receiver)(void* context, const char* name, const char* value);

/* Since version 3. Reads crumbd's figures of this moment and passes each to `receiver`: version,
 * node_id, uptime_seconds, sessions, leases, reservations, keyspaces; tier.NAME.pages and so on;
 * lookup_tokens.NAME; and crumbd's counters by their names. */
CRUMB_API crumb_code crumb_client_read_stats(crumb_client* client, crumb_stat_receiver receiver,
                                             void* context);

/* -- Pages by key: for engines that keep their own KV cache ----------------------------------- */

typedef struct crumb_keyspace_spec {
  size_t size;
  const char* const* names; /* [fields] docs/formats/keyspace.md */
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

/* Keys of the full pages of a sequence. keyspace [32]; keys [token_count / 64, 32] */
CRUMB_API crumb_code crumb_page_keys(const uint8_t* keyspace, const int32_t* tokens,
                                     size_t token_count, uint8_t* keys);
/* The key of a page that the engine names by bytes of its own. key [32] */
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

/* Tier of a page. */
#define CRUMB_TIER_UNKNOWN 0
#define CRUMB_TIER_DEVICE 1
#define CRUMB_TIER_HOST 2
#define CRUMB_TIER_SSD 3
#define CRUMB_TIER_REMOTE 4

/* How many leading pages are there. keys [pages, 32]; tiers [pages] of the hits, or NULL; `reason`
 * is the first other page's, or NULL. */
CRUMB_API crumb_code crumb_lookup(crumb_client* client, const uint8_t* keyspace,
                                  const uint8_t* keys, size_t pages, size_t* hits, int32_t* tiers,
                                  crumb_miss* reason);

/* One fragment: the tiles of a range of layers and KV heads of one page, layer by layer. */
typedef struct crumb_fragment {
  uint8_t key[CRUMB_KEY_BYTES];
  uint8_t parent[CRUMB_KEY_BYTES]; /* zeros: first page of a sequence */
  uint32_t format;                 /* 1: BF16, 2: INT2 */
  uint32_t over_int2_prefix;       /* 1: computed while INT2 pages were attended */
  uint32_t layer_begin, layer_end;
  uint32_t head_begin, head_end;
  const void* tiles;
  size_t tiles_bytes;
} crumb_fragment;

/* Takes one fragment of page `page` of a crumb_get, valid during the call. Not 0: ends the get. */
typedef int (*crumb_receiver)(void* context, size_t page, const crumb_fragment* fragment);

/* Reads the pages up to the first miss, each checked against key, keyspace and sums. */
CRUMB_API crumb_code crumb_get(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys,
                               size_t pages, uint32_t timeout_ms, crumb_receiver receiver,
                               void* context, crumb_miss* reason);

/* Outcome of writing one fragment. */
#define CRUMB_PUT_STORED 1
#define CRUMB_PUT_DEDUPLICATED 2 /* its tiles were there already */
#define CRUMB_PUT_REFUSED 3      /* key, size or generation is wrong */
#define CRUMB_PUT_NO_ROOM 4

/* Writes fragments; sums are computed here. outcomes [count] CRUMB_PUT_*. */
CRUMB_API crumb_code crumb_put(crumb_client* client, const crumb_keyspace* keyspace,
                               const crumb_fragment* fragments, size_t count, uint32_t timeout_ms,
                               int32_t* outcomes);

/* -- Worker and sequence: the KV cache itself ------------------------------------------------- */

typedef struct crumb_worker crumb_worker;
typedef struct crumb_sequence crumb_sequence;

/* Runs body(argument, 0 .. count - 1) on any threads and returns when all are done. */
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
  float scale;                     /* of q.k; 0: 1 / sqrt(head_dim) */
  float soft_cap;                  /* 0: none */
  uint64_t page_bytes_max;         /* private memory for pages; 0: 16 GiB */
  uint32_t begin_deadline_ms;      /* 0: 200 */
  crumb_parallel_for parallel_for; /* NULL: all on the calling thread */
  void* parallel_context;
  /* This rank's part of the layers and heads above, as half-open ranges; zeros: all. k, v and q of
   * its sequences hold its heads only, and layers count from layer_begin on. crumb_rank_part fills
   * them in. */
  uint32_t layer_begin, layer_end;
  uint32_t head_begin, head_end;     /* KV heads */
  uint32_t q_head_begin, q_head_end; /* zeros: all query heads of those KV heads */
  uint32_t publishes_nothing;        /* 1: another rank publishes the same tiles */
} crumb_worker_options;

/* Sets the part of a rank in `options`, whose layers, kv_heads and q_heads are the model's, as
 * engines cut: stages of equal size, the first ones with one layer more when they do not divide;
 * equal shares of the heads; with more ranks than KV heads, neighbours hold the same KV head. */
CRUMB_API crumb_code crumb_rank_part(crumb_worker_options* options, uint32_t tp_rank,
                                     uint32_t tp_size, uint32_t pp_rank, uint32_t pp_size);

/* `client` may be NULL: no crumbd. */
CRUMB_API crumb_code crumb_worker_open(crumb_client* client, const crumb_worker_options* options,
                                       crumb_worker** out);
/* Sequences keep the worker alive. NULL is allowed. */
CRUMB_API void crumb_worker_close(crumb_worker* worker);
/* Waits until all that was queued for publishing was published or dropped. */
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
  const uint8_t* extra; /* [extra_pages, 32] digests of what else leading pages depend on */
  size_t extra_pages;
  uint32_t publish;          /* 0: all pages, 1: the prompt's, 2: none */
  uint32_t deadline_ms;      /* 0: the worker's; to wait for nothing: host_memory_only */
  uint32_t host_memory_only; /* 1: take only what this worker and host memory hold */
  /* Leading prompt tokens that the cache may supply are cached_tokens_max - 1; 0: all it has. */
  uint32_t cached_tokens_max_plus_one;
} crumb_sequence_options;

/* Starts a request: `cached_tokens` leading tokens of the prompt need no computing. `options` may
 * be NULL. A late or failed fetch is a miss, not an error. */
CRUMB_API crumb_code crumb_sequence_begin(crumb_worker* worker, const int32_t* tokens, size_t count,
                                          const crumb_sequence_options* options,
                                          crumb_sequence** out, uint32_t* cached_tokens);
/* For engines of several ranks: one leads and takes the longest prefix that is there for all layers
 * and heads; the others follow with its token, over the same tokens and options, and get the same
 * prefix. `token` has room for `token_capacity` bytes, CRUMB_LEAD_TOKEN_BYTES(count) at most;
 * CRUMB_ABORTED from crumb_sequence_follow: this rank cannot have all of it, lead again with the
 * cached_tokens_max that the message names. */
#define CRUMB_LEAD_TOKEN_BYTES(tokens) (256 + (tokens) / CRUMB_PAGE_TOKENS)
CRUMB_API crumb_code crumb_sequence_lead(crumb_worker* worker, const int32_t* tokens, size_t count,
                                         const crumb_sequence_options* options,
                                         crumb_sequence** out, uint32_t* cached_tokens, void* token,
                                         size_t token_capacity, size_t* token_bytes);
CRUMB_API crumb_code crumb_sequence_follow(crumb_worker* worker, const void* token,
                                           size_t token_bytes, const int32_t* tokens, size_t count,
                                           const crumb_sequence_options* options,
                                           crumb_sequence** out, uint32_t* cached_tokens);
/* k, v [tokens, kv_heads, head_dim] bf16 of one layer, after QK-norm and RoPE. */
CRUMB_API crumb_code crumb_sequence_append(crumb_sequence* sequence, uint32_t layer,
                                           uint32_t tokens, const void* k, const void* v);
/* q [tokens, q_heads, head_dim] bf16; out [tokens, q_heads, head_dim] f32. */
CRUMB_API crumb_code crumb_sequence_attend(crumb_sequence* sequence, uint32_t layer,
                                           uint32_t tokens, const void* q, float* out);
/* Ends a pass: these tokens of it are part of the sequence now, the rest is dropped. */
CRUMB_API crumb_code crumb_sequence_advance(crumb_sequence* sequence, const int32_t* tokens,
                                            size_t count);
CRUMB_API crumb_code crumb_sequence_fork(const crumb_sequence* sequence, crumb_sequence** out);
/* Publishes every full page. The handle is still to be closed. */
CRUMB_API crumb_code crumb_sequence_finish(crumb_sequence* sequence);
/* Without crumb_sequence_finish, pages still in the recent window are lost. NULL is allowed. */
CRUMB_API void crumb_sequence_close(crumb_sequence* sequence);
CRUMB_API uint32_t crumb_sequence_length(const crumb_sequence* sequence);

/* -- Transfer: pages between crumbd and an engine's own paged KV cache ------------------------ */

/* Since version 3. For engines that compute attention over a BF16 cache of their own: pages are
 * read from its blocks, quantized to INT2 (or kept in BF16, with history_bf16) and published, and
 * pages that crumbd has are written back as BF16 rows of the model's basis. A page has 64 tokens; a
 * block may have any number.
 *
 * The engine's scheduler names a keyspace, computes page keys and leases a prefix
 * (crumb_transfer_keyspace, _keys, _acquire). Its workers, which have the cache, move the bytes
 * (crumb_page_load_*, crumb_page_store_*). Every process opens a transfer with the same
 * crumb_worker_options, but the rank's part, over clients with the same `engine`. Tokens are opaque
 * bytes, of at most CRUMB_LEAD_TOKEN_BYTES(tokens of the keys) bytes, valid between processes of
 * one version of the library. Transfers are thread-safe; a load or a store is used by one thread at
 * a time. */

typedef struct crumb_transfer crumb_transfer;
typedef struct crumb_transfer_lease crumb_transfer_lease;
typedef struct crumb_page_load crumb_page_load;
typedef struct crumb_page_store crumb_page_store;

/* The K or V rows of one layer. Element i of the row of token t in block b and KV head h (from this
 * rank's first) is base[b * block_stride + h * head_stride + t * token_stride + i *
 * element_stride], in BF16; strides are elements. */
typedef struct crumb_paged_rows {
  void* base;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t element_stride;
} crumb_paged_rows;

/* A paged cache in this process's memory, which must stay valid until the transfer is closed. */
typedef struct crumb_paged_cache {
  size_t size;
  const crumb_paged_rows* k; /* [layers] of this rank */
  const crumb_paged_rows* v; /* [layers] */
  uint32_t layers;
  uint32_t block_tokens;
  uint64_t blocks;
} crumb_paged_cache;

/* Options as of a worker; those about attention are not used. */
CRUMB_API crumb_code crumb_transfer_open(crumb_client* client, const crumb_worker_options* options,
                                         crumb_transfer** out);
/* Leases, loads and stores keep the transfer alive. NULL is allowed. */
CRUMB_API void crumb_transfer_close(crumb_transfer* transfer);
/* Sets the cache for loads and stores that are opened later. */
CRUMB_API crumb_code crumb_transfer_use_cache(crumb_transfer* transfer,
                                              const crumb_paged_cache* cache);
/* Writes the token of the keyspace for requests that begin now; a request keeps its own. The
 * keyspace is opened again if crumbd was restarted, within `timeout_ms`. */
CRUMB_API crumb_code crumb_transfer_keyspace(crumb_transfer* transfer, uint32_t timeout_ms,
                                             void* token, size_t token_capacity,
                                             size_t* token_bytes);
/* Keys of the full pages of a sequence. `extra` [extra_pages, 32] has digests of what else leading
 * pages depend on (cache salt, LoRA adapter, images), zeros for nothing. keys [token_count / 64,
 * 32] */
CRUMB_API crumb_code crumb_transfer_keys(crumb_transfer* transfer, const void* keyspace_token,
                                         size_t keyspace_token_bytes, const int32_t* tokens,
                                         size_t token_count, const uint8_t* extra,
                                         size_t extra_pages, uint8_t* keys);
/* Leases the longest prefix of keys [pages, 32] that crumbd has for all layers and heads, bringing
 * pages from SSD and other nodes to host memory within `deadline_ms` (0: only what host memory
 * has). `hit_pages` is 0 and *out NULL if there is none, also without crumbd. tiers [pages] of the
 * hits, or NULL; `reason` of the first miss, or NULL. `token` names the prefix to
 * crumb_page_load_open; the lease must be open until the loads are. */
CRUMB_API crumb_code crumb_transfer_acquire(crumb_transfer* transfer, const void* keyspace_token,
                                            size_t keyspace_token_bytes, const uint8_t* keys,
                                            size_t pages, uint32_t deadline_ms,
                                            crumb_transfer_lease** out, size_t* hit_pages,
                                            int32_t* tiers, crumb_miss* reason, void* token,
                                            size_t token_capacity, size_t* token_bytes);
/* NULL is allowed. */
CRUMB_API void crumb_transfer_lease_close(crumb_transfer_lease* lease);

/* Begins to load pages [first_page, end_page) of a leased prefix. keys [end_page, 32] from page 0
 * on; blocks [block_count] is the sequence's block table, from its first token on. `pages` is how
 * many of these pages this process can load: a page that failed its check ends them. */
CRUMB_API crumb_code crumb_page_load_open(crumb_transfer* transfer, const void* token,
                                          size_t token_bytes, const uint8_t* keys,
                                          size_t first_page, size_t end_page, const int64_t* blocks,
                                          size_t block_count, uint32_t deadline_ms,
                                          crumb_page_load** out, size_t* pages);
/* Writes the rows of layers [begin, end) of this rank into the cache. */
CRUMB_API crumb_code crumb_page_load_layers(crumb_page_load* load, uint32_t begin, uint32_t end);
/* NULL is allowed. */
CRUMB_API void crumb_page_load_close(crumb_page_load* load);

/* Begins to store `pages` pages from first_page on. keys [pages, 32]; parent [32] is the key of the
 * page before them, NULL if first_page is 0. over_int2_prefix: 1 if their rows were computed over a
 * prefix that was loaded from INT2 pages. CRUMB_RESOURCE_EXHAUSTED: page_bytes_max is in use by
 * pages still to be published. */
CRUMB_API crumb_code crumb_page_store_open(crumb_transfer* transfer, const void* keyspace_token,
                                           size_t keyspace_token_bytes, const uint8_t* parent,
                                           size_t first_page, const uint8_t* keys, size_t pages,
                                           const int64_t* blocks, size_t block_count,
                                           uint32_t over_int2_prefix, crumb_page_store** out);
/* Reads and quantizes the rows of layers [begin, end); the engine may overwrite them afterwards. */
CRUMB_API crumb_code crumb_page_store_layers(crumb_page_store* store, uint32_t begin, uint32_t end);
/* Queues the pages for publishing. CRUMB_FAILED_PRECONDITION: a layer was not stored. The handle is
 * still to be closed. */
CRUMB_API crumb_code crumb_page_store_finish(crumb_page_store* store);
/* Pages that were not finished are dropped. NULL is allowed. */
CRUMB_API void crumb_page_store_close(crumb_page_store* store);

/* Waits until all pages that were queued for publishing were published or dropped. */
CRUMB_API crumb_code crumb_transfer_wait_published(crumb_transfer* transfer, uint32_t timeout_ms);
CRUMB_API crumb_code crumb_transfer_read_counters(crumb_transfer* transfer,
                                                  crumb_worker_counters* out);

/* -- Device worker: the KV cache in the memory of one GPU ------------------------------------- */

/* Since version 2. As the worker above, for batches of sequences: all pointers to rows are device
 * pointers, and everything is enqueued on the batch's stream. The engine's own streams and pointers
 * of the same process will do. Workers are thread-safe; a batch, and the sequences in its pass, are
 * used by one thread at a time. */

typedef struct crumb_device crumb_device;
typedef struct crumb_device_worker crumb_device_worker;
typedef struct crumb_device_sequence crumb_device_sequence;
typedef struct crumb_device_batch crumb_device_batch;

/* Device `ordinal` of a back end; there is "cuda". CRUMB_UNAVAILABLE: no driver, or no such device;
 * CRUMB_FAILED_PRECONDITION: the library was built without the back end. */
CRUMB_API crumb_code crumb_device_open(const char* back_end, uint32_t ordinal, crumb_device** out);
/* Workers keep the device alive. NULL is allowed. */
CRUMB_API void crumb_device_close(crumb_device* device);

typedef struct crumb_device_worker_options {
  size_t size;
  uint32_t pages;            /* private INT2 pages; 0: 4,096 */
  uint32_t sequences;        /* that hold tokens at once; 0: 64 */
  uint32_t prompts;          /* of those, inside their prompt; 0: 2 */
  uint32_t loads;            /* prefixes on their way to the device at once; 0: 4 */
  uint32_t load_pages;       /* of one of them; 0: 2,048 */
  uint32_t passes_in_flight; /* of a batch, queued on its stream; 0: 4 */
  uint32_t draft_slots;      /* tokens of a decode pass beside the first; 0: 7 */
  uint64_t pin_piece_bytes;  /* crumbd's memory is pinned in pieces of so many bytes; 0: 256 MiB */
  uint32_t pins_nothing;     /* 1: it is not pinned */
  /* Device pools that workers of a tenant share; pool_bytes 0: none. */
  uint32_t pool_copies_late; /* 1: pages go to crumbd's memory when their slots are needed only */
  uint64_t pool_bytes;
  uint64_t pool_sink_bytes;   /* 0: 256 MiB */
  uint64_t pool_handle_bytes; /* 0: 256 MiB */
  uint32_t pool_blank_pages;  /* 0: 256 */
  uint32_t pool_blank_sinks;  /* 0: 4 */
  const uint32_t*
      pool_peers; /* [pool_peer_count] ordinals of devices whose pools are copied from */
  size_t pool_peer_count;
  /* BF16 history pages, where INT2 is given up; allocated when they are needed; 0: 512 */
  uint32_t bf16_pages;
} crumb_device_worker_options;

/* `client` may be NULL: no crumbd; so may `device_options`. parallel_for and page_bytes_max of
 * `options` are not used. CRUMB_RESOURCE_EXHAUSTED: too little device memory. */
CRUMB_API crumb_code crumb_device_worker_open(crumb_client* client, crumb_device* device,
                                              const crumb_worker_options* options,
                                              const crumb_device_worker_options* device_options,
                                              crumb_device_worker** out);
/* Sequences and batches keep the worker alive. NULL is allowed. */
CRUMB_API void crumb_device_worker_close(crumb_device_worker* worker);
CRUMB_API crumb_code crumb_device_worker_wait_published(crumb_device_worker* worker,
                                                        uint32_t timeout_ms);
CRUMB_API crumb_code crumb_device_worker_read_counters(crumb_device_worker* worker,
                                                       crumb_worker_counters* out);

/* As crumb_sequence_begin, _lead and _follow. Cached pages may still be on their way when these
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
/* Between passes. NULL is allowed. */
CRUMB_API void crumb_device_sequence_close(crumb_device_sequence* sequence);
CRUMB_API uint32_t crumb_device_sequence_length(const crumb_device_sequence* sequence);
/* Most tokens that its next pass may bring. */
CRUMB_API uint32_t crumb_device_sequence_pass_tokens_max(const crumb_device_sequence* sequence);

typedef struct crumb_device_batch_options {
  size_t size;
  void* stream;        /* cudaStream_t of the engine's; NULL: the default stream */
  uint32_t prompts;    /* 1: passes bring chunks of prompts; 0: the next tokens behind them */
  uint32_t sequences;  /* places; 0: 1 */
  uint32_t tokens;     /* decode: of every sequence; prompts: of one at most; 0: 1 */
  uint32_t pages;      /* of one sequence; 0: 2,048 */
  uint32_t output_f32; /* 1: attention answers f32; 0: bf16 */
} crumb_device_batch_options;

CRUMB_API crumb_code crumb_device_batch_open(crumb_device_worker* worker,
                                             const crumb_device_batch_options* options,
                                             crumb_device_batch** out);
/* Waits for the passes on the stream. NULL is allowed. */
CRUMB_API void crumb_device_batch_close(crumb_device_batch* batch);

typedef struct crumb_pass_entry {
  crumb_device_sequence* sequence;
  uint32_t tokens; /* fresh ones; decode: the batch's */
} crumb_pass_entry;

/* A pass: prepare, start, append and attend of every layer, advance. What lies between prepare and
 * advance of a decode batch may be captured into a CUDA graph once and launched for every pass.
 * CRUMB_RESOURCE_EXHAUSTED: no room in device memory; nothing has changed. */
CRUMB_API crumb_code crumb_device_batch_prepare(crumb_device_batch* batch,
                                                const crumb_pass_entry* entries, size_t count);
CRUMB_API crumb_code crumb_device_batch_start(crumb_device_batch* batch);
/* k, v device [sequences, tokens, kv_heads, head_dim] bf16; of prompts [all fresh tokens, ...] */
CRUMB_API crumb_code crumb_device_batch_append(crumb_device_batch* batch, uint32_t layer,
                                               const void* k, const void* v);
/* q, out device [sequences, tokens, q_heads, head_dim]; of prompts [all fresh tokens, ...] */
CRUMB_API crumb_code crumb_device_batch_attend(crumb_device_batch* batch, uint32_t layer,
                                               const void* q, void* out);
/* Of entry i the first counts[i] fresh tokens stay: the next counts[i] ones of `tokens`.
 * CRUMB_DATA_LOSS: cached pages of the sequences that the message names came damaged. */
CRUMB_API crumb_code crumb_device_batch_advance(crumb_device_batch* batch, const int32_t* tokens,
                                                const uint32_t* counts, size_t entries);
CRUMB_API crumb_code crumb_device_batch_fork(crumb_device_batch* batch,
                                             crumb_device_sequence* sequence,
                                             crumb_device_sequence** out);
/* Publishes every full page. The handle is still to be closed. */
CRUMB_API crumb_code crumb_device_batch_finish(crumb_device_batch* batch,
                                               crumb_device_sequence* sequence);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_H_ */
