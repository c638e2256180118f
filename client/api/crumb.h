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
 *
 * This header has clients, pages by key, workers and sequences. Of the same library and version are
 * crumb_transfer.h (pages of an engine's own paged cache), crumb_blocks.h (attention over INT2
 * blocks that an engine allocates) and crumb_device.h (workers in the memory of a GPU).
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

#define CRUMB_ABI_VERSION 9
#define CRUMB_PAGE_TOKENS 64
#define CRUMB_KEY_BYTES 32

/* A result of a function: CRUMB_OK, or why it failed. The values are those of gRPC's status codes;
 * a code of gRPC's without a name here may be returned too. */
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
 * version 4 transfers of caches in device memory, version 5 attention over an engine's blocks,
 * version 6 the same for blocks in device memory, version 7 transfers of an engine's blocks,
 * version 8 page keys that continue a sequence, version 9 transfers of FP8 caches, sliding windows
 * and sink logits. */
CRUMB_API uint32_t crumb_abi_version(void);
/* Returns the text of this thread's last error, or "". Valid until the thread's next call. A
 * success does not clear the text. A NULL handle returns CRUMB_INVALID_ARGUMENT without a text of
 * its own. */
CRUMB_API const char* crumb_message(void);

/* -- Client: a process's connection to crumbd ------------------------------------------------- */

typedef struct crumb_client crumb_client;

/* How the process reaches crumbd. Only one of socket_dir and address is used: address, if it is
 * set. */
typedef struct crumb_client_options {
  size_t size;
  const char* socket_dir;   /* NULL: /run/crumb */
  const char* address;      /* "HOST:PORT" for gRPC over TCP, without shared memory */
  const char* process_name; /* name in crumbd's log */
  /* 16 random bytes that the engine's processes have in common; NULL: an engine of its own */
  const uint8_t* engine;
  uint64_t staging_bytes;      /* requested size; crumbd may grant less; 0: 64 MiB */
  uint32_t connect_timeout_ms; /* limit of one attempt; 0: 1,000 */
  uint32_t call_timeout_ms;    /* 0: 2,000 */
  /* PEM files for TLS to `address`; NULL or "": none. */
  const char* tls_ca_file;   /* verifies crumbd's certificate */
  const char* tls_cert_file; /* this process's certificate, if crumbd verifies callers */
  const char* tls_key_file;
  /* expected name in crumbd's certificate; NULL: the host of `address` */
  const char* tls_server_name;
  const char* token; /* identifies the tenant; NULL: none */
} crumb_client_options;

/* Makes one attempt to connect, which need not succeed; see crumb_client_connected. A thread
 * continues to try in the background, and a call without connection returns CRUMB_UNAVAILABLE at
 * once. Open the client after a fork: a child of a process that has a connection gets none. */
CRUMB_API crumb_code crumb_client_open(const crumb_client_options* options, crumb_client** out);
/* Workers and sequences that use the client keep it alive. `client` may be NULL. The handle is
 * invalid afterwards. */
CRUMB_API void crumb_client_close(crumb_client* client);
/* Returns 1 if there is a connection now, else 0; 0 for NULL. A call may still fail. */
CRUMB_API int crumb_client_connected(crumb_client* client);
/* CRUMB_UNAVAILABLE: there is no connection within the time. */
CRUMB_API crumb_code crumb_client_wait_connected(crumb_client* client, uint32_t timeout_ms);
/* Blocks until every page that was committed before is durable. The message of an error says how
 * many pages are not durable, and why. `durable_pages` may be NULL. CRUMB_UNAVAILABLE: crumbd has
 * no SSD tier that takes pages; CRUMB_RESOURCE_EXHAUSTED: the tier has no room; CRUMB_DATA_LOSS:
 * pages left memory before they were written. */
CRUMB_API crumb_code crumb_client_flush(crumb_client* client, uint32_t timeout_ms,
                                        uint64_t* durable_pages);

/* Receives one value of crumb_client_read_stats as text, which is valid during the call. */
typedef void (*crumb_stat_receiver)(void* context, const char* name, const char* value);

/* Since version 3. Reads crumbd's present statistics and passes each value to `receiver`: version,
 * node_id, uptime_seconds, sessions, leases, reservations, keyspaces; tier.NAME.pages and so on;
 * lookup_tokens.NAME; and crumbd's counters by their names. `receiver` is called on this thread,
 * before the function returns. */
CRUMB_API crumb_code crumb_client_read_stats(crumb_client* client, crumb_stat_receiver receiver,
                                             void* context);

/* -- Pages by key: for engines that keep their own KV cache ----------------------------------- */

/* Everything that two pages must have in common to be interchangeable. Field names and values are
 * compared byte by byte; the geometry determines the size of tiles. */
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

/* A keyspace that crumbd has opened. Pages are written with its id and generation; a higher
 * generation than before means that all pages were dropped. The struct has no `size`: it does not
 * grow. */
typedef struct crumb_keyspace {
  uint8_t id[CRUMB_KEY_BYTES];
  uint64_t generation;
  uint32_t int2_tile_bytes;
  uint32_t bf16_tile_bytes;
  uint32_t serves_bf16_only; /* 1: INT2 pages are switched off */
} crumb_keyspace;

/* Opens the keyspace, and creates it if crumbd does not know it. Equal specs return equal ids. */
CRUMB_API crumb_code crumb_keyspace_open(crumb_client* client, const crumb_keyspace_spec* spec,
                                         uint32_t timeout_ms, crumb_keyspace* out);

/* Computes the keys of the full pages of a sequence. keyspace [32]; keys [token_count / 64, 32] A
 * key covers all tokens from the first one on; tokens behind the last full page have no key. Needs
 * no client. */
CRUMB_API crumb_code crumb_page_keys(const uint8_t* keyspace, const int32_t* tokens,
                                     size_t token_count, uint8_t* keys);
/* Computes the key of a page that the engine identifies by other bytes. key [32]. It depends on no
 * other page: the engine decides which pages belong together. */
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
 * or NULL; `reason` says why the first page behind the hits is a miss, or NULL. A miss is a result,
 * not an error. Leases nothing: a page may be evicted before it is read. */
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

/* Reads the pages up to the first miss; key, keyspace and checksums of each are verified. Blocks
 * for `timeout_ms` at most. `receiver` is called on this thread, fragment by fragment; a page has
 * several if several ranks wrote it. `reason` may be NULL. CRUMB_ABORTED: the receiver ended the
 * get. */
CRUMB_API crumb_code crumb_get(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys,
                               size_t pages, uint32_t timeout_ms, crumb_receiver receiver,
                               void* context, crumb_miss* reason);

/* The outcome of writing one fragment. */
#define CRUMB_PUT_STORED 1
#define CRUMB_PUT_DEDUPLICATED 2 /* the tiles are in the cache already */
#define CRUMB_PUT_REFUSED 3      /* the key, size or generation is wrong */
#define CRUMB_PUT_NO_ROOM 4

/* Writes fragments, whose checksums it computes. outcomes [count] CRUMB_PUT_*. Tiles are copied
 * before the function returns. The size of `tiles` is the number of tiles times the keyspace's tile
 * size of the format; CRUMB_INVALID_ARGUMENT: it is not, or the format is neither 1 nor 2, and
 * nothing was sent. Refused fragments do not affect the others. */
CRUMB_API crumb_code crumb_put(crumb_client* client, const crumb_keyspace* keyspace,
                               const crumb_fragment* fragments, size_t count, uint32_t timeout_ms,
                               int32_t* outcomes);

/* -- Worker and sequence: the KV cache itself ------------------------------------------------- */

typedef struct crumb_worker crumb_worker;
typedef struct crumb_sequence crumb_sequence;

/* Runs body(argument, 0 .. count - 1) on any threads and returns when all have finished. */
typedef void (*crumb_parallel_for)(void* context, int32_t count,
                                   void (*body)(void* argument, int32_t index), void* argument);

/* The model's description comes first: its members become part of the keyspace, so workers that
 * differ in one of them share no page. Members from recent_tokens on concern this process alone.
 * `model`, `weights`, the sizes and `rope` have no defaults. */
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
  /* Since version 9. Both arrays are those of the whole model, and are copied. */
  /* [layers] a token attends the last windows[i] positions, its own included; 0: all positions.
   * NULL: no layer has a sliding window */
  const uint32_t* windows;
  /* [layers, q_heads] learned logits that join the softmax sums (attention sinks); NULL: none */
  const float* sink_logits;
} crumb_worker_options;

/* Sets the part of a rank in `options`, whose layers, kv_heads and q_heads are the model's. Layers
 * are cut into consecutive pipeline stages of equal size; if they do not divide, the first stages
 * have one layer more. Heads are divided equally; with more ranks than KV heads, neighbours hold
 * the same KV head. CRUMB_INVALID_ARGUMENT: heads do not divide, there are more stages than layers,
 * or `options` is that of a header before these members existed. */
CRUMB_API crumb_code crumb_rank_part(crumb_worker_options* options, uint32_t tp_rank,
                                     uint32_t tp_size, uint32_t pp_rank, uint32_t pp_size);

/* `client` may be NULL, which means no crumbd. Opens the keyspace if crumbd is connected.
 * CRUMB_INVALID_ARGUMENT names the option that is wrong; CRUMB_NOT_FOUND: there is no such rotation
 * file. */
CRUMB_API crumb_code crumb_worker_open(crumb_client* client, const crumb_worker_options* options,
                                       crumb_worker** out);
/* Sequences keep the worker alive. `worker` may be NULL. */
CRUMB_API void crumb_worker_close(crumb_worker* worker);
/* Blocks until every page queued for publishing was published or dropped. CRUMB_DEADLINE_EXCEEDED:
 * some are still queued after `timeout_ms`. For programs that are about to exit; engines need not
 * wait. */
CRUMB_API crumb_code crumb_worker_wait_published(crumb_worker* worker, uint32_t timeout_ms);

/* Events since the worker was opened. hit_tokens_* are prompt tokens that need not be computed, by
 * the place in which their pages were found; each page that crumbd did not take is counted in one
 * of publish_refused and publish_dropped. */
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
  uint64_t hit_tokens_device; /* set since version 2 */
  uint64_t pool_pages;
} crumb_worker_counters;

/* Writes the members that out->size covers. Does not block. */
CRUMB_API crumb_code crumb_worker_read_counters(crumb_worker* worker, crumb_worker_counters* out);

/* Choices of one request. Zeros are right for most. */
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
 * be NULL. A late or failed fetch is a miss, not an error. Blocks for the deadline at most.
 * `tokens` is the whole prompt, not empty; `cached_tokens` is a multiple of 64 and may be NULL. */
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
/* Stores k, v [tokens, kv_heads, head_dim] bf16 of one layer, after QK-norm and RoPE.
 *
 * A pass over n fresh tokens calls append and attend for every layer and advance once. It has at
 * most the rest of the prompt, and after the prompt 1 + 8 tokens. `layer` counts from 0 at this
 * rank's first. CRUMB_RESOURCE_EXHAUSTED: page_bytes_max is reached; the call can be repeated once
 * other sequences were closed. CRUMB_FAILED_PRECONDITION: the layer has its rows already, or the
 * sequence was finished. */
CRUMB_API crumb_code crumb_sequence_append(crumb_sequence* sequence, uint32_t layer,
                                           uint32_t tokens, const void* k, const void* v);
/* Computes attention. q [tokens, q_heads, head_dim] bf16; out [tokens, q_heads, head_dim] f32.
 * Every fresh token attends all tokens in front of it and itself. CRUMB_FAILED_PRECONDITION: the
 * layer has no rows of this pass. */
CRUMB_API crumb_code crumb_sequence_attend(crumb_sequence* sequence, uint32_t layer,
                                           uint32_t tokens, const void* q, float* out);
/* Ends a pass: `tokens` become part of the sequence, the pass's other tokens are dropped. `count`
 * may be less than the pass's tokens if drafts were rejected, and is 0 for a pass that is
 * abandoned. In the prompt the tokens must be the prompt's (CRUMB_INVALID_ARGUMENT).
 * CRUMB_RESOURCE_EXHAUSTED: the pass has ended, but a page that is due waits for memory. */
CRUMB_API crumb_code crumb_sequence_advance(crumb_sequence* sequence, const int32_t* tokens,
                                            size_t count);
/* Makes another sequence that continues from here, between passes only. Pages are common to both;
 * rows of the recent window are copied. Both handles must be closed. */
CRUMB_API crumb_code crumb_sequence_fork(const crumb_sequence* sequence, crumb_sequence** out);
/* Publishes every full page. The handle must still be closed. Publishing goes on in the background
 * after the handle is closed, as long as the worker is open. */
CRUMB_API crumb_code crumb_sequence_finish(crumb_sequence* sequence);
/* Without crumb_sequence_finish, pages in the recent window are lost. `sequence` may be NULL. */
CRUMB_API void crumb_sequence_close(crumb_sequence* sequence);
/* Returns the number of tokens held, cached ones included: the position of the next token. */
CRUMB_API uint32_t crumb_sequence_length(const crumb_sequence* sequence);

/* -- Device: a GPU, whose memory the functions of the other headers use ----------------------- */

typedef struct crumb_device crumb_device;

/* Opens device `ordinal` of a back end, which must be "cuda". CRUMB_UNAVAILABLE: there is no
 * driver, or no such device; CRUMB_FAILED_PRECONDITION: the library was built without the back end.
 * The current device of the calling thread does not change. */
CRUMB_API crumb_code crumb_device_open(const char* back_end, uint32_t ordinal, crumb_device** out);
/* Objects that use the device keep it alive. `device` may be NULL. */
CRUMB_API void crumb_device_close(crumb_device* device);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_H_ */
