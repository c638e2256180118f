// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb.h"

// Implements the functions of crumb.h for workers and sequences.
namespace crumb::c_api {

crumb_code WorkerOpen(crumb_client* client, const crumb_worker_options* options,
                      crumb_worker** out);
void WorkerClose(crumb_worker* worker);
crumb_code WorkerWaitPublished(crumb_worker* worker, uint32_t timeout_ms);
crumb_code WorkerReadCounters(crumb_worker* worker, crumb_worker_counters* out);
crumb_code SequenceBegin(crumb_worker* worker, const int32_t* tokens, size_t count,
                         const crumb_sequence_options* options, crumb_sequence** out,
                         uint32_t* cached_tokens);
crumb_code PartOfRank(crumb_worker_options* options, uint32_t tp_rank, uint32_t tp_size,
                      uint32_t pp_rank, uint32_t pp_size);
crumb_code SequenceLead(crumb_worker* worker, const int32_t* tokens, size_t count,
                        const crumb_sequence_options* options, crumb_sequence** out,
                        uint32_t* cached_tokens, void* token, size_t token_capacity,
                        size_t* token_bytes);
crumb_code SequenceFollow(crumb_worker* worker, const void* token, size_t token_bytes,
                          const int32_t* tokens, size_t count,
                          const crumb_sequence_options* options, crumb_sequence** out,
                          uint32_t* cached_tokens);
crumb_code SequenceAppend(crumb_sequence* sequence, uint32_t layer, uint32_t tokens, const void* k,
                          const void* v);
crumb_code SequenceAttend(crumb_sequence* sequence, uint32_t layer, uint32_t tokens, const void* q,
                          float* out);
crumb_code SequenceAdvance(crumb_sequence* sequence, const int32_t* tokens, size_t count);
crumb_code SequenceFork(const crumb_sequence* sequence, crumb_sequence** out);
crumb_code SequenceFinish(crumb_sequence* sequence);
void SequenceClose(crumb_sequence* sequence);
uint32_t SequenceLength(const crumb_sequence* sequence);

}  // namespace crumb::c_api
