/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * libcrumb.so: brings libcrumb_core.so, which lies beside it, into the process when it is first
 * needed, in a scope of its own, and hands every call on. docs/adr/0005 says why. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "client/c_api/core_table.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const crumb_core_table* core;
static char failure[1024];

/* Symbols of the core are looked up in its own libraries first: a process may have another gRPC or
 * protobuf among its global ones. This is not possible if malloc was replaced: the core would use
 * libc's malloc and get memory of the other one, or the other way round. */
static int Flags(void) {
  void* const libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  const int replaced = libc == NULL || dlsym(libc, "malloc") != dlsym(RTLD_DEFAULT, "malloc");
  if (libc != NULL) dlclose(libc);
  return RTLD_NOW | RTLD_LOCAL | (replaced ? 0 : RTLD_DEEPBIND);
}

static void Load(void) {
  Dl_info self;
  char path[4096];
  if (dladdr((void*)&crumb_abi_version, &self) == 0) {
    snprintf(failure, sizeof(failure), "libcrumb.so does not find itself");
    return;
  }
  const char* const slash = strrchr(self.dli_fname, '/');
  const int folder = slash == NULL ? 0 : (int)(slash - self.dli_fname + 1);
  snprintf(path, sizeof(path), "%.*slibcrumb_core.so." CRUMB_CORE_VERSION, folder, self.dli_fname);
  void* const library = dlopen(path, Flags());
  if (library == NULL) {
    snprintf(failure, sizeof(failure), "%s", dlerror());
    return;
  }
  const crumb_core_table* (*entry)(void) = NULL;
  *(void**)&entry = dlsym(library, "crumb_core");
  if (entry == NULL) {
    snprintf(failure, sizeof(failure), "%.900s is no core of libcrumb.so", path);
    return;
  }
  core = entry();
}

static int Ready(void) {
  pthread_once(&once, Load);
  return core != NULL;
}

uint32_t crumb_abi_version(void) { return CRUMB_ABI_VERSION; }

const char* crumb_message(void) { return core != NULL ? core->message() : failure; }

/* Functions with which a program starts; they load the core. */
crumb_code crumb_client_open(const crumb_client_options* options, crumb_client** out) {
  return Ready() ? core->client_open(options, out) : CRUMB_UNAVAILABLE;
}
crumb_code crumb_worker_open(crumb_client* client, const crumb_worker_options* options,
                             crumb_worker** out) {
  return Ready() ? core->worker_open(client, options, out) : CRUMB_UNAVAILABLE;
}
crumb_code crumb_page_keys(const uint8_t* keyspace, const int32_t* tokens, size_t token_count,
                           uint8_t* keys) {
  return Ready() ? core->page_keys(keyspace, tokens, token_count, keys) : CRUMB_UNAVAILABLE;
}
crumb_code crumb_rank_part(crumb_worker_options* options, uint32_t tp_rank, uint32_t tp_size,
                           uint32_t pp_rank, uint32_t pp_size) {
  return Ready() ? core->rank_part(options, tp_rank, tp_size, pp_rank, pp_size) : CRUMB_UNAVAILABLE;
}
crumb_code crumb_foreign_key(const uint8_t* keyspace, const void* name, size_t name_bytes,
                             uint8_t* key) {
  return Ready() ? core->foreign_key(keyspace, name, name_bytes, key) : CRUMB_UNAVAILABLE;
}

/* Functions that take a handle: without the core there is no handle, except NULL. */
#define CRUMB_HANDED(handle, call) ((handle) != NULL && Ready() ? (call) : CRUMB_INVALID_ARGUMENT)

void crumb_client_close(crumb_client* client) {
  if (client != NULL) core->client_close(client);
}
int crumb_client_connected(crumb_client* client) {
  return client != NULL && core->client_connected(client);
}
crumb_code crumb_client_wait_connected(crumb_client* client, uint32_t timeout_ms) {
  return CRUMB_HANDED(client, core->client_wait_connected(client, timeout_ms));
}
crumb_code crumb_client_flush(crumb_client* client, uint32_t timeout_ms, uint64_t* durable_pages) {
  return CRUMB_HANDED(client, core->client_flush(client, timeout_ms, durable_pages));
}
crumb_code crumb_client_read_stats(crumb_client* client, crumb_stat_receiver receiver,
                                   void* context) {
  return CRUMB_HANDED(client, core->client_read_stats(client, receiver, context));
}
crumb_code crumb_keyspace_open(crumb_client* client, const crumb_keyspace_spec* spec,
                               uint32_t timeout_ms, crumb_keyspace* out) {
  return CRUMB_HANDED(client, core->keyspace_open(client, spec, timeout_ms, out));
}
crumb_code crumb_lookup(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys,
                        size_t pages, size_t* hits, int32_t* tiers, crumb_miss* reason) {
  return CRUMB_HANDED(client, core->lookup(client, keyspace, keys, pages, hits, tiers, reason));
}
crumb_code crumb_get(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys,
                     size_t pages, uint32_t timeout_ms, crumb_receiver receiver, void* context,
                     crumb_miss* reason) {
  return CRUMB_HANDED(
      client, core->get(client, keyspace, keys, pages, timeout_ms, receiver, context, reason));
}
crumb_code crumb_put(crumb_client* client, const crumb_keyspace* keyspace,
                     const crumb_fragment* fragments, size_t count, uint32_t timeout_ms,
                     int32_t* outcomes) {
  return CRUMB_HANDED(client, core->put(client, keyspace, fragments, count, timeout_ms, outcomes));
}
void crumb_worker_close(crumb_worker* worker) {
  if (worker != NULL) core->worker_close(worker);
}
crumb_code crumb_worker_wait_published(crumb_worker* worker, uint32_t timeout_ms) {
  return CRUMB_HANDED(worker, core->worker_wait_published(worker, timeout_ms));
}
crumb_code crumb_worker_read_counters(crumb_worker* worker, crumb_worker_counters* out) {
  return CRUMB_HANDED(worker, core->worker_read_counters(worker, out));
}
crumb_code crumb_sequence_begin(crumb_worker* worker, const int32_t* tokens, size_t count,
                                const crumb_sequence_options* options, crumb_sequence** out,
                                uint32_t* cached_tokens) {
  return CRUMB_HANDED(worker,
                      core->sequence_begin(worker, tokens, count, options, out, cached_tokens));
}
crumb_code crumb_sequence_lead(crumb_worker* worker, const int32_t* tokens, size_t count,
                               const crumb_sequence_options* options, crumb_sequence** out,
                               uint32_t* cached_tokens, void* token, size_t token_capacity,
                               size_t* token_bytes) {
  return CRUMB_HANDED(worker,
                      core->sequence_lead(worker, tokens, count, options, out, cached_tokens, token,
                                          token_capacity, token_bytes));
}
crumb_code crumb_sequence_follow(crumb_worker* worker, const void* token, size_t token_bytes,
                                 const int32_t* tokens, size_t count,
                                 const crumb_sequence_options* options, crumb_sequence** out,
                                 uint32_t* cached_tokens) {
  return CRUMB_HANDED(worker, core->sequence_follow(worker, token, token_bytes, tokens, count,
                                                    options, out, cached_tokens));
}
crumb_code crumb_sequence_append(crumb_sequence* sequence, uint32_t layer, uint32_t tokens,
                                 const void* k, const void* v) {
  return CRUMB_HANDED(sequence, core->sequence_append(sequence, layer, tokens, k, v));
}
crumb_code crumb_sequence_attend(crumb_sequence* sequence, uint32_t layer, uint32_t tokens,
                                 const void* q, float* out) {
  return CRUMB_HANDED(sequence, core->sequence_attend(sequence, layer, tokens, q, out));
}
crumb_code crumb_sequence_advance(crumb_sequence* sequence, const int32_t* tokens, size_t count) {
  return CRUMB_HANDED(sequence, core->sequence_advance(sequence, tokens, count));
}
crumb_code crumb_sequence_fork(const crumb_sequence* sequence, crumb_sequence** out) {
  return CRUMB_HANDED(sequence, core->sequence_fork(sequence, out));
}
crumb_code crumb_sequence_finish(crumb_sequence* sequence) {
  return CRUMB_HANDED(sequence, core->sequence_finish(sequence));
}
void crumb_sequence_close(crumb_sequence* sequence) {
  if (sequence != NULL) core->sequence_close(sequence);
}
uint32_t crumb_sequence_length(const crumb_sequence* sequence) {
  return sequence != NULL ? core->sequence_length(sequence) : 0;
}

/* Transfers. */
crumb_code crumb_transfer_open(crumb_client* client, const crumb_worker_options* options,
                               crumb_transfer** out) {
  return CRUMB_HANDED(client, core->transfer_open(client, options, out));
}
void crumb_transfer_close(crumb_transfer* transfer) {
  if (transfer != NULL) core->transfer_close(transfer);
}
crumb_code crumb_transfer_use_cache(crumb_transfer* transfer, const crumb_paged_cache* cache) {
  return CRUMB_HANDED(transfer, core->transfer_use_cache(transfer, cache));
}
crumb_code crumb_transfer_use_blocks(crumb_transfer* transfer, const crumb_block_cache* cache) {
  return CRUMB_HANDED(transfer, core->transfer_use_blocks(transfer, cache));
}
crumb_code crumb_transfer_keyspace(crumb_transfer* transfer, uint32_t timeout_ms, void* token,
                                   size_t token_capacity, size_t* token_bytes) {
  return CRUMB_HANDED(
      transfer, core->transfer_keyspace(transfer, timeout_ms, token, token_capacity, token_bytes));
}
crumb_code crumb_transfer_keys(crumb_transfer* transfer, const void* keyspace_token,
                               size_t keyspace_token_bytes, const int32_t* tokens,
                               size_t token_count, const uint8_t* extra, size_t extra_pages,
                               uint8_t* keys) {
  return CRUMB_HANDED(transfer, core->transfer_keys(transfer, keyspace_token, keyspace_token_bytes,
                                                    tokens, token_count, extra, extra_pages, keys));
}
crumb_code crumb_transfer_next_keys(crumb_transfer* transfer, const void* keyspace_token,
                                    size_t keyspace_token_bytes, const uint8_t* parent,
                                    const int32_t* tokens, size_t token_count, const uint8_t* extra,
                                    size_t extra_pages, uint8_t* keys) {
  return CRUMB_HANDED(
      transfer, core->transfer_next_keys(transfer, keyspace_token, keyspace_token_bytes, parent,
                                         tokens, token_count, extra, extra_pages, keys));
}
crumb_code crumb_transfer_acquire(crumb_transfer* transfer, const void* keyspace_token,
                                  size_t keyspace_token_bytes, const uint8_t* keys, size_t pages,
                                  uint32_t deadline_ms, crumb_transfer_lease** out,
                                  size_t* hit_pages, int32_t* tiers, crumb_miss* reason,
                                  void* token, size_t token_capacity, size_t* token_bytes) {
  return CRUMB_HANDED(
      transfer, core->transfer_acquire(transfer, keyspace_token, keyspace_token_bytes, keys, pages,
                                       deadline_ms, out, hit_pages, tiers, reason, token,
                                       token_capacity, token_bytes));
}
void crumb_transfer_lease_close(crumb_transfer_lease* lease) {
  if (lease != NULL) core->transfer_lease_close(lease);
}
crumb_code crumb_page_load_open(crumb_transfer* transfer, const void* token, size_t token_bytes,
                                const uint8_t* keys, size_t first_page, size_t end_page,
                                const int64_t* blocks, size_t block_count, uint32_t deadline_ms,
                                crumb_page_load** out, size_t* pages) {
  return CRUMB_HANDED(transfer,
                      core->page_load_open(transfer, token, token_bytes, keys, first_page, end_page,
                                           blocks, block_count, deadline_ms, out, pages));
}
crumb_code crumb_page_load_layers(crumb_page_load* load, uint32_t begin, uint32_t end) {
  return CRUMB_HANDED(load, core->page_load_layers(load, begin, end));
}
crumb_code crumb_page_load_enqueue(crumb_page_load* load, uint32_t begin, uint32_t end,
                                   void* stream) {
  return CRUMB_HANDED(load, core->page_load_enqueue(load, begin, end, stream));
}
crumb_code crumb_page_load_done(crumb_page_load* load, uint32_t* done) {
  return CRUMB_HANDED(load, core->page_load_done(load, done));
}
crumb_code crumb_page_load_wait(crumb_page_load* load) {
  return CRUMB_HANDED(load, core->page_load_wait(load));
}
void crumb_page_load_close(crumb_page_load* load) {
  if (load != NULL) core->page_load_close(load);
}
crumb_code crumb_page_store_open(crumb_transfer* transfer, const void* keyspace_token,
                                 size_t keyspace_token_bytes, const uint8_t* parent,
                                 size_t first_page, const uint8_t* keys, size_t pages,
                                 const int64_t* blocks, size_t block_count,
                                 uint32_t over_int2_prefix, crumb_page_store** out) {
  return CRUMB_HANDED(
      transfer,
      core->page_store_open(transfer, keyspace_token, keyspace_token_bytes, parent, first_page,
                            keys, pages, blocks, block_count, over_int2_prefix, out));
}
crumb_code crumb_page_store_layers(crumb_page_store* store, uint32_t begin, uint32_t end) {
  return CRUMB_HANDED(store, core->page_store_layers(store, begin, end));
}
crumb_code crumb_page_store_enqueue(crumb_page_store* store, uint32_t begin, uint32_t end,
                                    void* stream) {
  return CRUMB_HANDED(store, core->page_store_enqueue(store, begin, end, stream));
}
crumb_code crumb_page_store_finish(crumb_page_store* store) {
  return CRUMB_HANDED(store, core->page_store_finish(store));
}
void crumb_page_store_close(crumb_page_store* store) {
  if (store != NULL) core->page_store_close(store);
}
crumb_code crumb_transfer_wait_published(crumb_transfer* transfer, uint32_t timeout_ms) {
  return CRUMB_HANDED(transfer, core->transfer_wait_published(transfer, timeout_ms));
}
crumb_code crumb_transfer_read_counters(crumb_transfer* transfer, crumb_worker_counters* out) {
  return CRUMB_HANDED(transfer, core->transfer_read_counters(transfer, out));
}

/* Blocks. */
crumb_code crumb_block_geometry_of(const crumb_worker_options* options, crumb_block_geometry* out) {
  return Ready() ? core->block_geometry_of(options, out) : CRUMB_UNAVAILABLE;
}
crumb_code crumb_block_attention_open(const crumb_worker_options* options,
                                      crumb_block_attention** out) {
  return Ready() ? core->block_attention_open(options, out) : CRUMB_UNAVAILABLE;
}
void crumb_block_attention_close(crumb_block_attention* attention) {
  if (attention != NULL) core->block_attention_close(attention);
}
crumb_code crumb_block_attend(crumb_block_attention* attention, uint32_t layer,
                              const crumb_block_pool* pool, const crumb_block_batch* batch,
                              const crumb_block_rows* rows) {
  return CRUMB_HANDED(attention, core->block_attend(attention, layer, pool, batch, rows));
}
crumb_code crumb_device_blocks_open(crumb_device* device, const crumb_worker_options* options,
                                    const crumb_device_block_options* device_options,
                                    crumb_device_blocks** out) {
  return CRUMB_HANDED(device, core->device_blocks_open(device, options, device_options, out));
}
void crumb_device_blocks_close(crumb_device_blocks* blocks) {
  if (blocks != NULL) core->device_blocks_close(blocks);
}
uint64_t crumb_device_blocks_bytes(const crumb_device_blocks* blocks) {
  return blocks != NULL ? core->device_blocks_bytes(blocks) : 0;
}
crumb_code crumb_device_blocks_prepare(crumb_device_blocks* blocks, const crumb_block_pool* pool,
                                       const crumb_block_batch* batch, const crumb_block_step* step,
                                       void* stream) {
  return CRUMB_HANDED(blocks, core->device_blocks_prepare(blocks, pool, batch, step, stream));
}
crumb_code crumb_device_blocks_attend(crumb_device_blocks* blocks, uint32_t layer,
                                      const crumb_block_pool* pool, const crumb_block_rows* rows,
                                      void* stream) {
  return CRUMB_HANDED(blocks, core->device_blocks_attend(blocks, layer, pool, rows, stream));
}
crumb_code crumb_device_blocks_check(crumb_device_blocks* blocks) {
  return CRUMB_HANDED(blocks, core->device_blocks_check(blocks));
}

/* Device workers. */
crumb_code crumb_device_open(const char* back_end, uint32_t ordinal, crumb_device** out) {
  return Ready() ? core->device_open(back_end, ordinal, out) : CRUMB_UNAVAILABLE;
}
void crumb_device_close(crumb_device* device) {
  if (device != NULL) core->device_close(device);
}
crumb_code crumb_device_worker_open(crumb_client* client, crumb_device* device,
                                    const crumb_worker_options* options,
                                    const crumb_device_worker_options* device_options,
                                    crumb_device_worker** out) {
  return CRUMB_HANDED(device,
                      core->device_worker_open(client, device, options, device_options, out));
}
void crumb_device_worker_close(crumb_device_worker* worker) {
  if (worker != NULL) core->device_worker_close(worker);
}
crumb_code crumb_device_worker_wait_published(crumb_device_worker* worker, uint32_t timeout_ms) {
  return CRUMB_HANDED(worker, core->device_worker_wait_published(worker, timeout_ms));
}
crumb_code crumb_device_worker_read_counters(crumb_device_worker* worker,
                                             crumb_worker_counters* out) {
  return CRUMB_HANDED(worker, core->device_worker_read_counters(worker, out));
}
crumb_code crumb_device_sequence_begin(crumb_device_worker* worker, const int32_t* tokens,
                                       size_t count, const crumb_sequence_options* options,
                                       crumb_device_sequence** out, uint32_t* cached_tokens) {
  return CRUMB_HANDED(
      worker, core->device_sequence_begin(worker, tokens, count, options, out, cached_tokens));
}
crumb_code crumb_device_sequence_lead(crumb_device_worker* worker, const int32_t* tokens,
                                      size_t count, const crumb_sequence_options* options,
                                      crumb_device_sequence** out, uint32_t* cached_tokens,
                                      void* token, size_t token_capacity, size_t* token_bytes) {
  return CRUMB_HANDED(
      worker, core->device_sequence_lead(worker, tokens, count, options, out, cached_tokens, token,
                                         token_capacity, token_bytes));
}
crumb_code crumb_device_sequence_follow(crumb_device_worker* worker, const void* token,
                                        size_t token_bytes, const int32_t* tokens, size_t count,
                                        const crumb_sequence_options* options,
                                        crumb_device_sequence** out, uint32_t* cached_tokens) {
  return CRUMB_HANDED(worker, core->device_sequence_follow(worker, token, token_bytes, tokens,
                                                           count, options, out, cached_tokens));
}
void crumb_device_sequence_close(crumb_device_sequence* sequence) {
  if (sequence != NULL) core->device_sequence_close(sequence);
}
uint32_t crumb_device_sequence_length(const crumb_device_sequence* sequence) {
  return sequence != NULL ? core->device_sequence_length(sequence) : 0;
}
uint32_t crumb_device_sequence_pass_tokens_max(const crumb_device_sequence* sequence) {
  return sequence != NULL ? core->device_sequence_pass_tokens_max(sequence) : 0;
}
crumb_code crumb_device_batch_open(crumb_device_worker* worker,
                                   const crumb_device_batch_options* options,
                                   crumb_device_batch** out) {
  return CRUMB_HANDED(worker, core->device_batch_open(worker, options, out));
}
void crumb_device_batch_close(crumb_device_batch* batch) {
  if (batch != NULL) core->device_batch_close(batch);
}
crumb_code crumb_device_batch_prepare(crumb_device_batch* batch, const crumb_pass_entry* entries,
                                      size_t count) {
  return CRUMB_HANDED(batch, core->device_batch_prepare(batch, entries, count));
}
crumb_code crumb_device_batch_start(crumb_device_batch* batch) {
  return CRUMB_HANDED(batch, core->device_batch_start(batch));
}
crumb_code crumb_device_batch_append(crumb_device_batch* batch, uint32_t layer, const void* k,
                                     const void* v) {
  return CRUMB_HANDED(batch, core->device_batch_append(batch, layer, k, v));
}
crumb_code crumb_device_batch_attend(crumb_device_batch* batch, uint32_t layer, const void* q,
                                     void* out) {
  return CRUMB_HANDED(batch, core->device_batch_attend(batch, layer, q, out));
}
crumb_code crumb_device_batch_advance(crumb_device_batch* batch, const int32_t* tokens,
                                      const uint32_t* counts, size_t entries) {
  return CRUMB_HANDED(batch, core->device_batch_advance(batch, tokens, counts, entries));
}
crumb_code crumb_device_batch_fork(crumb_device_batch* batch, crumb_device_sequence* sequence,
                                   crumb_device_sequence** out) {
  return CRUMB_HANDED(batch, core->device_batch_fork(batch, sequence, out));
}
crumb_code crumb_device_batch_finish(crumb_device_batch* batch, crumb_device_sequence* sequence) {
  return CRUMB_HANDED(batch, core->device_batch_finish(batch, sequence));
}
