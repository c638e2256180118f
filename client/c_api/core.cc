// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/blocks.h"
#include "client/c_api/core_table.h"
#include "client/c_api/devices.h"
#include "client/c_api/handles.h"
#include "client/c_api/pages.h"
#include "client/c_api/sequences.h"
#include "client/c_api/transfers.h"

namespace crumb::c_api {

static_assert(CRUMB_OK == static_cast<int>(absl::StatusCode::kOk));
static_assert(CRUMB_INVALID_ARGUMENT == static_cast<int>(absl::StatusCode::kInvalidArgument));
static_assert(CRUMB_DEADLINE_EXCEEDED == static_cast<int>(absl::StatusCode::kDeadlineExceeded));
static_assert(CRUMB_NOT_FOUND == static_cast<int>(absl::StatusCode::kNotFound));
static_assert(CRUMB_RESOURCE_EXHAUSTED == static_cast<int>(absl::StatusCode::kResourceExhausted));
static_assert(CRUMB_FAILED_PRECONDITION == static_cast<int>(absl::StatusCode::kFailedPrecondition));
static_assert(CRUMB_ABORTED == static_cast<int>(absl::StatusCode::kAborted));
static_assert(CRUMB_OUT_OF_RANGE == static_cast<int>(absl::StatusCode::kOutOfRange));
static_assert(CRUMB_UNIMPLEMENTED == static_cast<int>(absl::StatusCode::kUnimplemented));
static_assert(CRUMB_INTERNAL == static_cast<int>(absl::StatusCode::kInternal));
static_assert(CRUMB_UNAVAILABLE == static_cast<int>(absl::StatusCode::kUnavailable));
static_assert(CRUMB_DATA_LOSS == static_cast<int>(absl::StatusCode::kDataLoss));

std::string& MessageOfThread() {
  thread_local std::string message;
  return message;
}

crumb_code Finish(const absl::Status& status) {
  if (status.ok()) return CRUMB_OK;
  MessageOfThread() = std::string(status.message());
  return static_cast<crumb_code>(status.code());
}

}  // namespace crumb::c_api

const crumb_core_table* crumb_core() {
  using namespace crumb::c_api;
  static const crumb_core_table table = {
      .message = [] { return MessageOfThread().c_str(); },
      .client_open = ClientOpen,
      .client_close = ClientClose,
      .client_connected = ClientConnected,
      .client_wait_connected = ClientWaitConnected,
      .client_flush = ClientFlush,
      .client_read_stats = ClientReadStats,
      .keyspace_open = KeyspaceOpen,
      .page_keys = PageKeys,
      .foreign_key = ForeignKey,
      .lookup = Lookup,
      .get = Get,
      .put = Put,
      .worker_open = WorkerOpen,
      .worker_close = WorkerClose,
      .worker_wait_published = WorkerWaitPublished,
      .worker_read_counters = WorkerReadCounters,
      .sequence_begin = SequenceBegin,
      .rank_part = PartOfRank,
      .sequence_lead = SequenceLead,
      .sequence_follow = SequenceFollow,
      .sequence_append = SequenceAppend,
      .sequence_attend = SequenceAttend,
      .sequence_advance = SequenceAdvance,
      .sequence_fork = SequenceFork,
      .sequence_finish = SequenceFinish,
      .sequence_close = SequenceClose,
      .sequence_length = SequenceLength,
      .transfer_open = TransferOpen,
      .transfer_close = TransferClose,
      .transfer_use_cache = TransferUseCache,
      .transfer_use_blocks = TransferUseBlocks,
      .transfer_keyspace = TransferKeyspace,
      .transfer_keys = TransferKeys,
      .transfer_next_keys = TransferNextKeys,
      .transfer_acquire = TransferAcquire,
      .transfer_lease_close = TransferLeaseClose,
      .page_load_open = PageLoadOpen,
      .page_load_layers = PageLoadLayers,
      .page_load_enqueue = PageLoadEnqueue,
      .page_load_done = PageLoadDone,
      .page_load_wait = PageLoadWait,
      .page_load_close = PageLoadClose,
      .page_store_open = PageStoreOpen,
      .page_store_layers = PageStoreLayers,
      .page_store_enqueue = PageStoreEnqueue,
      .page_store_finish = PageStoreFinish,
      .page_store_close = PageStoreClose,
      .transfer_wait_published = TransferWaitPublished,
      .transfer_read_counters = TransferReadCounters,
      .block_geometry_of = GeometryOfBlocks,
      .block_attention_open = BlockAttentionOpen,
      .block_attention_close = BlockAttentionClose,
      .block_attend = BlockAttend,
      .device_blocks_open = DeviceBlocksOpen,
      .device_blocks_close = DeviceBlocksClose,
      .device_blocks_bytes = DeviceBlocksBytes,
      .device_blocks_prepare = DeviceBlocksPrepare,
      .device_blocks_attend = DeviceBlocksAttend,
      .device_blocks_check = DeviceBlocksCheck,
      .device_open = DeviceOpen,
      .device_close = DeviceClose,
      .device_worker_open = DeviceWorkerOpen,
      .device_worker_close = DeviceWorkerClose,
      .device_worker_wait_published = DeviceWorkerWaitPublished,
      .device_worker_read_counters = DeviceWorkerReadCounters,
      .device_sequence_begin = DeviceSequenceBegin,
      .device_sequence_lead = DeviceSequenceLead,
      .device_sequence_follow = DeviceSequenceFollow,
      .device_sequence_close = DeviceSequenceClose,
      .device_sequence_length = DeviceSequenceLength,
      .device_sequence_pass_tokens_max = DeviceSequencePassTokensMax,
      .device_batch_open = DeviceBatchOpen,
      .device_batch_close = DeviceBatchClose,
      .device_batch_prepare = DeviceBatchPrepare,
      .device_batch_start = DeviceBatchStart,
      .device_batch_append = DeviceBatchAppend,
      .device_batch_attend = DeviceBatchAttend,
      .device_batch_advance = DeviceBatchAdvance,
      .device_batch_fork = DeviceBatchFork,
      .device_batch_finish = DeviceBatchFinish,
  };
  return &table;
}
