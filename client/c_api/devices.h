// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb_device.h"

// Implements the functions of crumb_device.h for device workers. Handles are not null.
namespace crumb::c_api {

crumb_code DeviceOpen(const char* back_end, uint32_t ordinal, crumb_device** out);
void DeviceClose(crumb_device* device);
crumb_code DeviceWorkerOpen(crumb_client* client, crumb_device* device,
                            const crumb_worker_options* options,
                            const crumb_device_worker_options* device_options,
                            crumb_device_worker** out);
void DeviceWorkerClose(crumb_device_worker* worker);
crumb_code DeviceWorkerWaitPublished(crumb_device_worker* worker, uint32_t timeout_ms);
crumb_code DeviceWorkerReadCounters(crumb_device_worker* worker, crumb_worker_counters* out);
crumb_code DeviceSequenceBegin(crumb_device_worker* worker, const int32_t* tokens, size_t count,
                               const crumb_sequence_options* options, crumb_device_sequence** out,
                               uint32_t* cached_tokens);
crumb_code DeviceSequenceLead(crumb_device_worker* worker, const int32_t* tokens, size_t count,
                              const crumb_sequence_options* options, crumb_device_sequence** out,
                              uint32_t* cached_tokens, void* token, size_t token_capacity,
                              size_t* token_bytes);
crumb_code DeviceSequenceFollow(crumb_device_worker* worker, const void* token, size_t token_bytes,
                                const int32_t* tokens, size_t count,
                                const crumb_sequence_options* options, crumb_device_sequence** out,
                                uint32_t* cached_tokens);
void DeviceSequenceClose(crumb_device_sequence* sequence);
uint32_t DeviceSequenceLength(const crumb_device_sequence* sequence);
uint32_t DeviceSequencePassTokensMax(const crumb_device_sequence* sequence);
crumb_code DeviceBatchOpen(crumb_device_worker* worker, const crumb_device_batch_options* options,
                           crumb_device_batch** out);
void DeviceBatchClose(crumb_device_batch* batch);
crumb_code DeviceBatchPrepare(crumb_device_batch* batch, const crumb_pass_entry* entries,
                              size_t count);
crumb_code DeviceBatchStart(crumb_device_batch* batch);
crumb_code DeviceBatchAppend(crumb_device_batch* batch, uint32_t layer, const void* k,
                             const void* v);
crumb_code DeviceBatchAttend(crumb_device_batch* batch, uint32_t layer, const void* q, void* out);
crumb_code DeviceBatchAdvance(crumb_device_batch* batch, const int32_t* tokens,
                              const uint32_t* counts, size_t entries);
crumb_code DeviceBatchFork(crumb_device_batch* batch, crumb_device_sequence* sequence,
                           crumb_device_sequence** out);
crumb_code DeviceBatchFinish(crumb_device_batch* batch, crumb_device_sequence* sequence);

}  // namespace crumb::c_api
