/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * The functions of libcrumb_core.so (the client) that libcrumb.so (the C interface alone) calls.
 * Both are of one build: the table has no versions of its own. */
#ifndef CRUMB_CLIENT_C_API_CORE_TABLE_H_
#define CRUMB_CLIENT_C_API_CORE_TABLE_H_

#include "crumb.h"
#include "crumb_blocks.h"
#include "crumb_device.h"
#include "crumb_transfer.h"

/* The functions of the C interface that the core implements: X(name without crumb_, function of the
 * core). A new one needs a line here, its declaration in a public header, its definition in the
 * core, and a call in loader.c. */
/* clang-format off */
#define CRUMB_CORE_FUNCTIONS(X) \
  X(message, Message)                                             \
  X(client_open, ClientOpen)                                      \
  X(client_close, ClientClose)                                    \
  X(client_connected, ClientConnected)                            \
  X(client_wait_connected, ClientWaitConnected)                   \
  X(client_flush, ClientFlush)                                    \
  X(client_read_stats, ClientReadStats)                           \
  X(keyspace_open, KeyspaceOpen)                                  \
  X(page_keys, PageKeys)                                          \
  X(foreign_key, ForeignKey)                                      \
  X(lookup, Lookup)                                               \
  X(get, Get)                                                     \
  X(put, Put)                                                     \
  X(worker_open, WorkerOpen)                                      \
  X(worker_close, WorkerClose)                                    \
  X(worker_wait_published, WorkerWaitPublished)                   \
  X(worker_read_counters, WorkerReadCounters)                     \
  X(sequence_begin, SequenceBegin)                                \
  X(rank_part, PartOfRank)                                        \
  X(sequence_lead, SequenceLead)                                  \
  X(sequence_follow, SequenceFollow)                              \
  X(sequence_append, SequenceAppend)                              \
  X(sequence_attend, SequenceAttend)                              \
  X(sequence_advance, SequenceAdvance)                            \
  X(sequence_fork, SequenceFork)                                  \
  X(sequence_finish, SequenceFinish)                              \
  X(sequence_close, SequenceClose)                                \
  X(sequence_length, SequenceLength)                              \
  X(transfer_open, TransferOpen)                                  \
  X(transfer_close, TransferClose)                                \
  X(transfer_use_cache, TransferUseCache)                         \
  X(transfer_use_blocks, TransferUseBlocks)                       \
  X(transfer_keyspace, TransferKeyspace)                          \
  X(transfer_keys, TransferKeys)                                  \
  X(transfer_next_keys, TransferNextKeys)                         \
  X(transfer_acquire, TransferAcquire)                            \
  X(transfer_lease_close, TransferLeaseClose)                     \
  X(page_load_open, PageLoadOpen)                                 \
  X(page_load_layers, PageLoadLayers)                             \
  X(page_load_enqueue, PageLoadEnqueue)                           \
  X(page_load_done, PageLoadDone)                                 \
  X(page_load_wait, PageLoadWait)                                 \
  X(page_load_close, PageLoadClose)                               \
  X(page_store_open, PageStoreOpen)                               \
  X(page_store_layers, PageStoreLayers)                           \
  X(page_store_enqueue, PageStoreEnqueue)                         \
  X(page_store_finish, PageStoreFinish)                           \
  X(page_store_close, PageStoreClose)                             \
  X(transfer_wait_published, TransferWaitPublished)               \
  X(transfer_read_counters, TransferReadCounters)                 \
  X(block_geometry_of, GeometryOfBlocks)                          \
  X(block_attention_open, BlockAttentionOpen)                     \
  X(block_attention_close, BlockAttentionClose)                   \
  X(block_attend, BlockAttend)                                    \
  X(device_blocks_open, DeviceBlocksOpen)                         \
  X(device_blocks_close, DeviceBlocksClose)                       \
  X(device_blocks_bytes, DeviceBlocksBytes)                       \
  X(device_blocks_prepare, DeviceBlocksPrepare)                   \
  X(device_blocks_attend, DeviceBlocksAttend)                     \
  X(device_blocks_check, DeviceBlocksCheck)                       \
  X(device_open, DeviceOpen)                                      \
  X(device_close, DeviceClose)                                    \
  X(device_worker_open, DeviceWorkerOpen)                         \
  X(device_worker_close, DeviceWorkerClose)                       \
  X(device_worker_wait_published, DeviceWorkerWaitPublished)      \
  X(device_worker_read_counters, DeviceWorkerReadCounters)        \
  X(device_sequence_begin, DeviceSequenceBegin)                   \
  X(device_sequence_lead, DeviceSequenceLead)                     \
  X(device_sequence_follow, DeviceSequenceFollow)                 \
  X(device_sequence_close, DeviceSequenceClose)                   \
  X(device_sequence_length, DeviceSequenceLength)                 \
  X(device_sequence_pass_tokens_max, DeviceSequencePassTokensMax) \
  X(device_batch_open, DeviceBatchOpen)                           \
  X(device_batch_close, DeviceBatchClose)                         \
  X(device_batch_prepare, DeviceBatchPrepare)                     \
  X(device_batch_start, DeviceBatchStart)                         \
  X(device_batch_append, DeviceBatchAppend)                       \
  X(device_batch_attend, DeviceBatchAttend)                       \
  X(device_batch_advance, DeviceBatchAdvance)                     \
  X(device_batch_fork, DeviceBatchFork)                           \
  X(device_batch_finish, DeviceBatchFinish)
/* clang-format on */

#ifdef __cplusplus
/* The core's functions have the signatures of the public ones. Handles are not null. */
namespace crumb::c_api {
#define CRUMB_DECLARE(name, function) decltype(crumb_##name) function;
CRUMB_CORE_FUNCTIONS(CRUMB_DECLARE)
#undef CRUMB_DECLARE
}  // namespace crumb::c_api

extern "C" {
#endif

/* A member for every function above, a pointer to it. */
typedef struct crumb_core_table {
#define CRUMB_MEMBER(name, function) __typeof__(&crumb_##name) name;
  CRUMB_CORE_FUNCTIONS(CRUMB_MEMBER)
#undef CRUMB_MEMBER
} crumb_core_table;

/* The only symbol of libcrumb_core.so. */
CRUMB_API const crumb_core_table* crumb_core(void);

#ifdef __cplusplus
}
#endif

#endif /* CRUMB_CLIENT_C_API_CORE_TABLE_H_ */
