/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * Device worker: the KV cache in the memory of one GPU.
 *
 * Since version 2. As the worker of crumb.h, for batches of sequences: all pointers to rows are
 * device pointers, and everything is enqueued on the batch's stream. Streams and pointers of the
 * engine in the same process can be used. Workers are thread-safe; a batch, and the sequences in
 * its pass, are used by one thread at a time.
 */
#ifndef CRUMB_DEVICE_H_
#define CRUMB_DEVICE_H_

#include "crumb.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct crumb_device_worker crumb_device_worker;
typedef struct crumb_device_sequence crumb_device_sequence;
typedef struct crumb_device_batch crumb_device_batch;

/* Sizes of the memory that a worker keeps on its device. All of it except bf16_pages is allocated
 * when the worker is opened; docs/device_worker.md lists the bytes. */
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
/* The counterpart of crumb_worker_wait_published. It also waits for windows that the device has not
 * finished yet. */
CRUMB_API crumb_code crumb_device_worker_wait_published(crumb_device_worker* worker,
                                                        uint32_t timeout_ms);
/* The counterpart of crumb_worker_read_counters. */
CRUMB_API crumb_code crumb_device_worker_read_counters(crumb_device_worker* worker,
                                                       crumb_worker_counters* out);

/* The counterparts of crumb_sequence_begin, _lead and _follow. When they return, cached pages may
 * still be in flight; the batch waits for them on its stream. CRUMB_RESOURCE_EXHAUSTED: INT2 was
 * given up for this model, and there is no device memory for BF16 history. */
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
/* Returns the number of tokens held, cached ones included: the position of the next token. */
CRUMB_API uint32_t crumb_device_sequence_length(const crumb_device_sequence* sequence);
/* Returns the maximum number of tokens in its next pass. In the prompt it ends at the prompt's end
 * or at that of the prefill block; afterwards it is 1 + draft_slots. */
CRUMB_API uint32_t crumb_device_sequence_pass_tokens_max(const crumb_device_sequence* sequence);

/* Fixed sizes of a batch. They determine grids and workspaces, so that one captured graph serves
 * every decode pass. */
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

/* Allocates the batch's workspaces. CRUMB_INVALID_ARGUMENT: the kernels do not support these sizes;
 * CRUMB_RESOURCE_EXHAUSTED: there is too little device memory. */
CRUMB_API crumb_code crumb_device_batch_open(crumb_device_worker* worker,
                                             const crumb_device_batch_options* options,
                                             crumb_device_batch** out);
/* Blocks until the passes on the stream are done. `batch` may be NULL. */
CRUMB_API void crumb_device_batch_close(crumb_device_batch* batch);

/* One sequence of a pass and its number of fresh tokens. Sequence i of the pass occupies row i of
 * q, k, v and out. */
typedef struct crumb_pass_entry {
  crumb_device_sequence* sequence;
  uint32_t tokens; /* fresh tokens; decode: the batch's number */
} crumb_pass_entry;

/* A pass calls prepare, start, append and attend of every layer, and advance. In a decode batch the
 * calls between prepare and advance may be captured into a CUDA graph once and launched for every
 * pass. CRUMB_RESOURCE_EXHAUSTED: there is no room in device memory; nothing has changed. Prepare
 * waits while passes_in_flight passes are queued; no other call of a pass waits for the device,
 * except advance at the end of a prompt. */
CRUMB_API crumb_code crumb_device_batch_prepare(crumb_device_batch* batch,
                                                const crumb_pass_entry* entries, size_t count);
/* Enqueues the eviction of all windows that are due in a decode pass, in one launch. */
CRUMB_API crumb_code crumb_device_batch_start(crumb_device_batch* batch);
/* k, v device [sequences, tokens, kv_heads, head_dim] bf16; for prompts [all fresh tokens, ...]
 * Rows are those after QK-norm and RoPE. For prompts, attend of the layer reads them again. */
CRUMB_API crumb_code crumb_device_batch_append(crumb_device_batch* batch, uint32_t layer,
                                               const void* k, const void* v);
/* q, out device [sequences, tokens, q_heads, head_dim]; for prompts [all fresh tokens, ...] `out`
 * has the type of output_f32. Rows of padding are not written. */
CRUMB_API crumb_code crumb_device_batch_attend(crumb_device_batch* batch, uint32_t layer,
                                               const void* q, void* out);
/* Ends the pass. The first counts[i] fresh tokens of entry i stay; they are the next counts[i]
 * elements of `tokens`. CRUMB_DATA_LOSS: cached pages of the sequences that the message names are
 * damaged. */
CRUMB_API crumb_code crumb_device_batch_advance(crumb_device_batch* batch, const int32_t* tokens,
                                                const uint32_t* counts, size_t entries);
/* Makes another sequence that continues from here, between passes only. Windows are copied on the
 * device; pages are common to both. */
CRUMB_API crumb_code crumb_device_batch_fork(crumb_device_batch* batch,
                                             crumb_device_sequence* sequence,
                                             crumb_device_sequence** out);
/* Publishes every full page. The handle must still be closed. */
CRUMB_API crumb_code crumb_device_batch_finish(crumb_device_batch* batch,
                                               crumb_device_sequence* sequence);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_DEVICE_H_ */
