/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * What libcrumb.so, which is the C interface and nothing else, calls in libcrumb_core.so, which is
 * the client. Both are of one build: the table has no versions of its own. */
#ifndef CRUMB_CLIENT_C_API_CORE_TABLE_H_
#define CRUMB_CLIENT_C_API_CORE_TABLE_H_

#include "crumb.h"
#include "crumb_blocks.h"
#include "crumb_device.h"
#include "crumb_transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A member for every function of the C interface that the core implements, named without crumb_. */
typedef struct crumb_core_table {
  const char* (*message)(void);
  crumb_code (*client_open)(const crumb_client_options*, crumb_client**);
  void (*client_close)(crumb_client*);
  int (*client_connected)(crumb_client*);
  crumb_code (*client_wait_connected)(crumb_client*, uint32_t);
  crumb_code (*client_flush)(crumb_client*, uint32_t, uint64_t*);
  crumb_code (*client_read_stats)(crumb_client*, crumb_stat_receiver, void*);
  crumb_code (*keyspace_open)(crumb_client*, const crumb_keyspace_spec*, uint32_t, crumb_keyspace*);
  crumb_code (*page_keys)(const uint8_t*, const int32_t*, size_t, uint8_t*);
  crumb_code (*foreign_key)(const uint8_t*, const void*, size_t, uint8_t*);
  crumb_code (*lookup)(crumb_client*, const uint8_t*, const uint8_t*, size_t, size_t*, int32_t*,
                       crumb_miss*);
  crumb_code (*get)(crumb_client*, const uint8_t*, const uint8_t*, size_t, uint32_t, crumb_receiver,
                    void*, crumb_miss*);
  crumb_code (*put)(crumb_client*, const crumb_keyspace*, const crumb_fragment*, size_t, uint32_t,
                    int32_t*);
  crumb_code (*worker_open)(crumb_client*, const crumb_worker_options*, crumb_worker**);
  void (*worker_close)(crumb_worker*);
  crumb_code (*worker_wait_published)(crumb_worker*, uint32_t);
  crumb_code (*worker_read_counters)(crumb_worker*, crumb_worker_counters*);
  crumb_code (*sequence_begin)(crumb_worker*, const int32_t*, size_t, const crumb_sequence_options*,
                               crumb_sequence**, uint32_t*);
  crumb_code (*rank_part)(crumb_worker_options*, uint32_t, uint32_t, uint32_t, uint32_t);
  crumb_code (*sequence_lead)(crumb_worker*, const int32_t*, size_t, const crumb_sequence_options*,
                              crumb_sequence**, uint32_t*, void*, size_t, size_t*);
  crumb_code (*sequence_follow)(crumb_worker*, const void*, size_t, const int32_t*, size_t,
                                const crumb_sequence_options*, crumb_sequence**, uint32_t*);
  crumb_code (*sequence_append)(crumb_sequence*, uint32_t, uint32_t, const void*, const void*);
  crumb_code (*sequence_attend)(crumb_sequence*, uint32_t, uint32_t, const void*, float*);
  crumb_code (*sequence_advance)(crumb_sequence*, const int32_t*, size_t);
  crumb_code (*sequence_fork)(const crumb_sequence*, crumb_sequence**);
  crumb_code (*sequence_finish)(crumb_sequence*);
  void (*sequence_close)(crumb_sequence*);
  uint32_t (*sequence_length)(const crumb_sequence*);
  crumb_code (*transfer_open)(crumb_client*, const crumb_worker_options*, crumb_transfer**);
  void (*transfer_close)(crumb_transfer*);
  crumb_code (*transfer_use_cache)(crumb_transfer*, const crumb_paged_cache*);
  crumb_code (*transfer_use_blocks)(crumb_transfer*, const crumb_block_cache*);
  crumb_code (*transfer_keyspace)(crumb_transfer*, uint32_t, void*, size_t, size_t*);
  crumb_code (*transfer_keys)(crumb_transfer*, const void*, size_t, const int32_t*, size_t,
                              const uint8_t*, size_t, uint8_t*);
  crumb_code (*transfer_next_keys)(crumb_transfer*, const void*, size_t, const uint8_t*,
                                   const int32_t*, size_t, const uint8_t*, size_t, uint8_t*);
  crumb_code (*transfer_acquire)(crumb_transfer*, const void*, size_t, const uint8_t*, size_t,
                                 uint32_t, crumb_transfer_lease**, size_t*, int32_t*, crumb_miss*,
                                 void*, size_t, size_t*);
  void (*transfer_lease_close)(crumb_transfer_lease*);
  crumb_code (*page_load_open)(crumb_transfer*, const void*, size_t, const uint8_t*, size_t, size_t,
                               const int64_t*, size_t, uint32_t, crumb_page_load**, size_t*);
  crumb_code (*page_load_layers)(crumb_page_load*, uint32_t, uint32_t);
  crumb_code (*page_load_enqueue)(crumb_page_load*, uint32_t, uint32_t, void*);
  crumb_code (*page_load_done)(crumb_page_load*, uint32_t*);
  crumb_code (*page_load_wait)(crumb_page_load*);
  void (*page_load_close)(crumb_page_load*);
  crumb_code (*page_store_open)(crumb_transfer*, const void*, size_t, const uint8_t*, size_t,
                                const uint8_t*, size_t, const int64_t*, size_t, uint32_t,
                                crumb_page_store**);
  crumb_code (*page_store_layers)(crumb_page_store*, uint32_t, uint32_t);
  crumb_code (*page_store_enqueue)(crumb_page_store*, uint32_t, uint32_t, void*);
  crumb_code (*page_store_finish)(crumb_page_store*);
  void (*page_store_close)(crumb_page_store*);
  crumb_code (*transfer_wait_published)(crumb_transfer*, uint32_t);
  crumb_code (*transfer_read_counters)(crumb_transfer*, crumb_worker_counters*);
  crumb_code (*block_geometry_of)(const crumb_worker_options*, crumb_block_geometry*);
  crumb_code (*block_attention_open)(const crumb_worker_options*, crumb_block_attention**);
  void (*block_attention_close)(crumb_block_attention*);
  crumb_code (*block_attend)(crumb_block_attention*, uint32_t, const crumb_block_pool*,
                             const crumb_block_batch*, const crumb_block_rows*);
  crumb_code (*device_blocks_open)(crumb_device*, const crumb_worker_options*,
                                   const crumb_device_block_options*, crumb_device_blocks**);
  void (*device_blocks_close)(crumb_device_blocks*);
  uint64_t (*device_blocks_bytes)(const crumb_device_blocks*);
  crumb_code (*device_blocks_prepare)(crumb_device_blocks*, const crumb_block_pool*,
                                      const crumb_block_batch*, const crumb_block_step*, void*);
  crumb_code (*device_blocks_attend)(crumb_device_blocks*, uint32_t, const crumb_block_pool*,
                                     const crumb_block_rows*, void*);
  crumb_code (*device_blocks_check)(crumb_device_blocks*);
  crumb_code (*device_open)(const char*, uint32_t, crumb_device**);
  void (*device_close)(crumb_device*);
  crumb_code (*device_worker_open)(crumb_client*, crumb_device*, const crumb_worker_options*,
                                   const crumb_device_worker_options*, crumb_device_worker**);
  void (*device_worker_close)(crumb_device_worker*);
  crumb_code (*device_worker_wait_published)(crumb_device_worker*, uint32_t);
  crumb_code (*device_worker_read_counters)(crumb_device_worker*, crumb_worker_counters*);
  crumb_code (*device_sequence_begin)(crumb_device_worker*, const int32_t*, size_t,
                                      const crumb_sequence_options*, crumb_device_sequence**,
                                      uint32_t*);
  crumb_code (*device_sequence_lead)(crumb_device_worker*, const int32_t*, size_t,
                                     const crumb_sequence_options*, crumb_device_sequence**,
                                     uint32_t*, void*, size_t, size_t*);
  crumb_code (*device_sequence_follow)(crumb_device_worker*, const void*, size_t, const int32_t*,
                                       size_t, const crumb_sequence_options*,
                                       crumb_device_sequence**, uint32_t*);
  void (*device_sequence_close)(crumb_device_sequence*);
  uint32_t (*device_sequence_length)(const crumb_device_sequence*);
  uint32_t (*device_sequence_pass_tokens_max)(const crumb_device_sequence*);
  crumb_code (*device_batch_open)(crumb_device_worker*, const crumb_device_batch_options*,
                                  crumb_device_batch**);
  void (*device_batch_close)(crumb_device_batch*);
  crumb_code (*device_batch_prepare)(crumb_device_batch*, const crumb_pass_entry*, size_t);
  crumb_code (*device_batch_start)(crumb_device_batch*);
  crumb_code (*device_batch_append)(crumb_device_batch*, uint32_t, const void*, const void*);
  crumb_code (*device_batch_attend)(crumb_device_batch*, uint32_t, const void*, void*);
  crumb_code (*device_batch_advance)(crumb_device_batch*, const int32_t*, const uint32_t*, size_t);
  crumb_code (*device_batch_fork)(crumb_device_batch*, crumb_device_sequence*,
                                  crumb_device_sequence**);
  crumb_code (*device_batch_finish)(crumb_device_batch*, crumb_device_sequence*);
} crumb_core_table;

/* The only symbol of libcrumb_core.so. */
CRUMB_API const crumb_core_table* crumb_core(void);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_CLIENT_C_API_CORE_TABLE_H_ */
