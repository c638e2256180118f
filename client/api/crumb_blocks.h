/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * Blocks: attention for engines that allocate INT2 blocks themselves.
 *
 * Since version 5. For engines whose own block pool holds the INT2 tiles. All blocks have one size:
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
 * are valid then, and all of them except the sink are attended in INT2.
 */
#ifndef CRUMB_BLOCKS_H_
#define CRUMB_BLOCKS_H_

#include "crumb_transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct crumb_block_attention crumb_block_attention;

/* Sizes by which an engine allocates blocks. A block of a layer has tile_bytes for each KV head; a
 * request needs sink_blocks + recent_blocks blocks beside one history block for each 64 tokens. */
typedef struct crumb_block_geometry {
  size_t size;             /* set by the caller; members beyond it are not written */
  uint32_t tile_bytes;     /* bytes of 64 tokens of one KV head, K and V */
  uint32_t rows_per_block; /* BF16 rows (K and V) for each KV head that a block has room for */
  uint32_t sink_blocks;    /* per request */
  uint32_t recent_blocks;  /* per request */
} crumb_block_geometry;

/* Computes the geometry from head_dim, group_size and recent_tokens. Other options are not read. */
CRUMB_API crumb_code crumb_block_geometry_of(const crumb_worker_options* options,
                                             crumb_block_geometry* out);
/* Takes the options of a worker; those about pages and publishing are not used.
 * CRUMB_INVALID_ARGUMENT: an option is wrong, history_bf16 is set, or the rotation file has R_V
 * folded into the weights. */
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

/* The requests of one step. Block ids of request s begin at table + s * stride.
 *
 * A request without fresh tokens takes no part. All arrays are read during the call (host memory),
 * or when the kernels run (device memory). CRUMB_INVALID_ARGUMENT: a request has a negative number
 * of tokens, or query_start does not begin with 0. */
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

/* Since version 6. Attention over blocks in device memory: pools, tables, lengths and rows are
 * device pointers, and everything is enqueued on the engine's stream. Nothing is allocated and
 * nothing waits, so that prepare and attend of all layers can be captured into a CUDA graph, which
 * serves every step of the same crumb_block_step: tables and lengths are read when the kernels run.
 * An object is used by one thread at a time. */
typedef struct crumb_device_blocks crumb_device_blocks;

/* Bounds of a step, for which device memory is allocated when the object is opened. */
typedef struct crumb_device_block_options {
  size_t size;
  uint32_t requests; /* 0: 256 */
  uint32_t tokens;   /* fresh tokens of all requests; 0: 8,192 */
  uint32_t pages;    /* history blocks of a request; 0: 512 */
  /* 1: a request whose first recent block is padding_block takes no part in a step */
  uint32_t has_padding_block;
  int32_t padding_block;
} crumb_device_block_options;

/* `device_options` may be NULL. The object keeps the device open. CRUMB_RESOURCE_EXHAUSTED: there
 * is too little device memory. */
CRUMB_API crumb_code crumb_device_blocks_open(crumb_device* device,
                                              const crumb_worker_options* options,
                                              const crumb_device_block_options* device_options,
                                              crumb_device_blocks** out);
/* `blocks` may be NULL. REQUIRES: all work enqueued with `blocks` has completed. */
CRUMB_API void crumb_device_blocks_close(crumb_device_blocks* blocks);
/* Returns the bytes of device memory that it has allocated, beside the model's rotations. */
CRUMB_API uint64_t crumb_device_blocks_bytes(const crumb_device_blocks* blocks);

/* The sizes of a step that the host knows. */
typedef struct crumb_block_step {
  size_t size;
  uint32_t decodes;    /* leading requests with one fresh token each, in order, or none */
  uint32_t tokens;     /* fresh tokens of all requests, or more */
  uint32_t tokens_max; /* fresh tokens of one request, or more */
} crumb_block_step;

/* Begins a step. `pool` is the memory of any one layer. Its base addresses and its block_stride, as
 * those of every pool here, are multiples of 128 bytes; CRUMB_INVALID_ARGUMENT: they are not, or
 * the step is larger than the object's bounds. After an error there is no step, and attend fails.
 * REQUIRES: every prepare passes the same layer's pool, because request headers are stored only
 * there. `stream` is the engine's cudaStream_t; NULL is the default stream. */
CRUMB_API crumb_code crumb_device_blocks_prepare(crumb_device_blocks* blocks,
                                                 const crumb_block_pool* pool,
                                                 const crumb_block_batch* batch,
                                                 const crumb_block_step* step, void* stream);
/* Stores the rows of one layer and computes attention. Tokens of q and of out are adjacent; all
 * rows begin at multiples of 16 bytes. */
CRUMB_API crumb_code crumb_device_blocks_attend(crumb_device_blocks* blocks, uint32_t layer,
                                                const crumb_block_pool* pool,
                                                const crumb_block_rows* rows, void* stream);
/* Returns the fault that the device found in a step's tables since the last call, without waiting
 * for it. Outputs of a request at fault are NaN; history blocks that it would have completed hold
 * anything. If query_start is not ascending from 0, all requests of the step are at fault. Codes
 * are those of crumb_block_attend. Call it now and then: a step with a fault returns CRUMB_OK when
 * it is enqueued. */
CRUMB_API crumb_code crumb_device_blocks_check(crumb_device_blocks* blocks);

/* An engine's blocks in this process's memory. They must stay valid until the transfer is closed.
 */
typedef struct crumb_block_cache {
  size_t size;
  const crumb_block_pool* pools; /* [layers], those of this rank; `recent` is not used */
  uint32_t layers;
} crumb_block_cache;

/* Since version 7. Sets the cache for loads and stores that are opened later, in place of
 * crumb_transfer_use_cache. The block table of a sequence then has its sink blocks, and behind them
 * its history blocks, one for each page: that of page 0 is not used. Tiles of history blocks are
 * copied as they are. Pages whose rows were computed over INT2 history are marked so, whatever
 * over_int2_prefix is. Engines with BF16 caches of the same model share these pages.
 * CRUMB_FAILED_PRECONDITION from crumb_page_store_open: INT2 pages are switched off. */
CRUMB_API crumb_code crumb_transfer_use_blocks(crumb_transfer* transfer,
                                               const crumb_block_cache* cache);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_BLOCKS_H_ */
