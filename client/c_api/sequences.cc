// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/core_table.h"

#include <cstddef>

#include "client/c_api/handles.h"
#include "client/c_api/options.h"
#include "client/c_api/starts.h"
#include "common/status_macros.h"
#include "kernels/tile.h"

namespace crumb::c_api {

using kernels::Bf16;

crumb_code WorkerOpen(crumb_client* client, const crumb_worker_options* options,
                      crumb_worker** out) {
  return Guarded([&]() -> absl::Status {
    if (options == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_worker_open: options or out is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::WorkerOptions wanted, OptionsOf(Known(options)));
    const std::shared_ptr<client::Client> connection = client ? client->client : nullptr;
    CRUMB_ASSIGN_OR_RETURN(auto worker, client::Worker::Open(wanted, connection.get()));
    *out = new crumb_worker{connection, std::move(worker)};
    return absl::OkStatus();
  });
}

void WorkerClose(crumb_worker* worker) { delete worker; }

crumb_code WorkerWaitPublished(crumb_worker* worker, uint32_t timeout_ms) {
  return Guarded(
      [&] { return worker->worker->WaitPublished(std::chrono::milliseconds(timeout_ms)); });
}

crumb_code WorkerReadCounters(crumb_worker* worker, crumb_worker_counters* out) {
  return Guarded([&] { return WriteCounters(worker->worker->counters(), out); });
}

crumb_code SequenceBegin(crumb_worker* worker, const int32_t* tokens, size_t count,
                         const crumb_sequence_options* options, crumb_sequence** out,
                         uint32_t* cached_tokens) {
  return StartAlone("crumb_sequence_begin", worker, tokens, count, options, out, cached_tokens);
}

crumb_code PartOfRank(crumb_worker_options* options, uint32_t tp_rank, uint32_t tp_size,
                      uint32_t pp_rank, uint32_t pp_size) {
  return Guarded([&]() -> absl::Status {
    // The fields of a part are those up to publishes_nothing; later versions added others.
    constexpr size_t kPartEnd =
        offsetof(crumb_worker_options, publishes_nothing) + sizeof(options->publishes_nothing);
    if (options == nullptr || options->size < kPartEnd) {
      return absl::InvalidArgumentError("crumb_rank_part: options is NULL or of an older header");
    }
    const client::RankPlace place{.tp_rank = static_cast<int>(tp_rank),
                                  .tp_size = static_cast<int>(tp_size),
                                  .pp_rank = static_cast<int>(pp_rank),
                                  .pp_size = static_cast<int>(pp_size)};
    CRUMB_ASSIGN_OR_RETURN(const client::RankPart part,
                           client::PartOfRank(place, static_cast<int>(options->layers),
                                              static_cast<int>(options->kv_heads),
                                              static_cast<int>(options->q_heads)));
    options->layer_begin = part.layers.begin, options->layer_end = part.layers.end;
    options->head_begin = part.kv_heads.begin, options->head_end = part.kv_heads.end;
    options->q_head_begin = part.q_heads.begin, options->q_head_end = part.q_heads.end;
    options->publishes_nothing = part.publishes ? 0 : 1;
    return absl::OkStatus();
  });
}

crumb_code SequenceLead(crumb_worker* worker, const int32_t* tokens, size_t count,
                        const crumb_sequence_options* options, crumb_sequence** out,
                        uint32_t* cached_tokens, void* token, size_t token_capacity,
                        size_t* token_bytes) {
  return StartLeading("crumb_sequence_lead", worker, tokens, count, options, out, cached_tokens,
                      token, token_capacity, token_bytes);
}

crumb_code SequenceFollow(crumb_worker* worker, const void* token, size_t token_bytes,
                          const int32_t* tokens, size_t count,
                          const crumb_sequence_options* options, crumb_sequence** out,
                          uint32_t* cached_tokens) {
  return StartFollowing("crumb_sequence_follow", worker, token, token_bytes, tokens, count, options,
                        out, cached_tokens);
}

crumb_code SequenceAppend(crumb_sequence* sequence, uint32_t layer, uint32_t tokens, const void* k,
                          const void* v) {
  return Guarded([&]() -> absl::Status {
    if (k == nullptr || v == nullptr) {
      return absl::InvalidArgumentError("crumb_sequence_append: k or v is NULL");
    }
    return sequence->sequence->Append(static_cast<int>(layer), static_cast<int>(tokens),
                                      static_cast<const Bf16*>(k), static_cast<const Bf16*>(v));
  });
}

crumb_code SequenceAttend(crumb_sequence* sequence, uint32_t layer, uint32_t tokens, const void* q,
                          float* out) {
  return Guarded([&]() -> absl::Status {
    if (q == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_sequence_attend: q or out is NULL");
    }
    return sequence->sequence->Attend(static_cast<int>(layer), static_cast<int>(tokens),
                                      static_cast<const Bf16*>(q), out);
  });
}

crumb_code SequenceAdvance(crumb_sequence* sequence, const int32_t* tokens, size_t count) {
  return Guarded([&]() -> absl::Status {
    if (tokens == nullptr && count > 0) {
      return absl::InvalidArgumentError("crumb_sequence_advance: tokens is NULL");
    }
    return sequence->sequence->Advance({tokens, count});
  });
}

crumb_code SequenceFork(const crumb_sequence* sequence, crumb_sequence** out) {
  return Guarded([&]() -> absl::Status {
    if (out == nullptr) return absl::InvalidArgumentError("crumb_sequence_fork: out is NULL");
    CRUMB_ASSIGN_OR_RETURN(auto fork, sequence->sequence->Fork());
    *out = new crumb_sequence{sequence->parts, std::move(fork)};
    return absl::OkStatus();
  });
}

crumb_code SequenceFinish(crumb_sequence* sequence) {
  return Guarded([&] { return sequence->sequence->Finish(); });
}

void SequenceClose(crumb_sequence* sequence) { delete sequence; }

uint32_t SequenceLength(const crumb_sequence* sequence) {
  return static_cast<uint32_t>(sequence->sequence->length());
}

}  // namespace crumb::c_api
