// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/core_table.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "client/c_api/handles.h"
#include "client/c_api/options.h"
#include "client/c_api/starts.h"
#include "common/status_macros.h"

namespace crumb::c_api {
namespace {

constexpr int kDraftSlots = 7;

void SetInt(uint32_t given, int* option) {
  if (given != 0) *option = IntOf(given);
}

template <typename Number>
void SetBytes(uint64_t given, Number* option) {
  if (given != 0) *option = given;
}

absl::StatusOr<client::DeviceWorkerOptions> OptionsOf(const crumb_device_worker_options& given) {
  client::DeviceWorkerOptions options;
  SetInt(given.pages, &options.pages);
  SetInt(given.bf16_pages, &options.bf16_pages);
  SetInt(given.sequences, &options.sequences);
  SetInt(given.prompts, &options.prompts);
  SetInt(given.loads, &options.loads);
  SetInt(given.load_pages, &options.load_pages);
  SetInt(given.passes_in_flight, &options.passes_in_flight);
  SetBytes(given.pin_piece_bytes, &options.pin_piece_bytes);
  if (given.pins_nothing != 0) options.pin_piece_bytes = 0;
  options.pool_write_through = given.pool_copies_late == 0;
  options.pool_bytes = given.pool_bytes;
  SetBytes(given.pool_sink_bytes, &options.pool_sink_bytes);
  SetBytes(given.pool_handle_bytes, &options.pool_handle_bytes);
  SetInt(given.pool_blank_pages, &options.pool_blank_pages);
  SetInt(given.pool_blank_sinks, &options.pool_blank_sinks);
  if (given.pool_peer_count > 0 && given.pool_peers == nullptr) {
    return absl::InvalidArgumentError("crumb_device_worker_options: pool_peers is NULL");
  }
  for (size_t i = 0; i < given.pool_peer_count; ++i) {
    options.pool_peers.push_back(static_cast<int>(given.pool_peers[i]));
  }
  return options;
}

client::DeviceBatchOptions OptionsOf(const crumb_device_batch_options& given) {
  client::DeviceBatchOptions options;
  options.stream = static_cast<client::DeviceStream>(given.stream);
  options.kind = given.prompts != 0 ? client::PassKind::kPrompt : client::PassKind::kDecode;
  SetInt(given.sequences, &options.sequences);
  SetInt(given.tokens, &options.tokens);
  SetInt(given.pages, &options.pages);
  options.output = given.output_f32 != 0 ? client::DeviceOutput::kF32 : client::DeviceOutput::kBf16;
  return options;
}

}  // namespace

crumb_code DeviceOpen(const char* back_end, uint32_t ordinal, crumb_device** out) {
  return Guarded([&]() -> absl::Status {
    if (back_end == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_device_open: back_end or out is NULL");
    }
    if (std::strcmp(back_end, "cuda") != 0) {
      return absl::InvalidArgumentError("crumb_device_open: there is no back end '" +
                                        std::string(back_end) + "', only cuda");
    }
    if (ordinal > INT32_MAX) return absl::UnavailableError("crumb_device_open: no such device");
    CRUMB_ASSIGN_OR_RETURN(client::OpenDevice device,
                           client::OpenCudaDevice(static_cast<int>(ordinal)));
    *out =
        new crumb_device{std::shared_ptr<client::Device>(device.release(), client::CloseDevice())};
    return absl::OkStatus();
  });
}

void DeviceClose(crumb_device* device) { delete device; }

crumb_code DeviceWorkerOpen(crumb_client* client, crumb_device* device,
                            const crumb_worker_options* options,
                            const crumb_device_worker_options* device_options,
                            crumb_device_worker** out) {
  return Guarded([&]() -> absl::Status {
    if (options == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_device_worker_open: options or out is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(client::WorkerOptions wanted, OptionsOf(Known(options)));
    wanted.draft_slots = kDraftSlots;
    wanted.watch_every = 0;  // the C interface has no quality watch for device workers
    const crumb_device_worker_options known = Known(device_options);
    SetInt(known.draft_slots, &wanted.draft_slots);
    CRUMB_ASSIGN_OR_RETURN(const client::DeviceWorkerOptions on_device, OptionsOf(known));
    const std::shared_ptr<client::Client> connection = client ? client->client : nullptr;
    CRUMB_ASSIGN_OR_RETURN(auto worker, client::DeviceWorker::Open(
                                            wanted, on_device, connection.get(), *device->device));
    *out = new crumb_device_worker{connection, device->device, std::move(worker)};
    return absl::OkStatus();
  });
}

void DeviceWorkerClose(crumb_device_worker* worker) { delete worker; }

crumb_code DeviceWorkerWaitPublished(crumb_device_worker* worker, uint32_t timeout_ms) {
  return Guarded(
      [&] { return worker->worker->WaitPublished(std::chrono::milliseconds(timeout_ms)); });
}

crumb_code DeviceWorkerReadCounters(crumb_device_worker* worker, crumb_worker_counters* out) {
  return Guarded([&] { return WriteCounters(worker->worker->counters(), out); });
}

crumb_code DeviceSequenceBegin(crumb_device_worker* worker, const int32_t* tokens, size_t count,
                               const crumb_sequence_options* options, crumb_device_sequence** out,
                               uint32_t* cached_tokens) {
  return StartAlone("crumb_device_sequence_begin", worker, tokens, count, options, out,
                    cached_tokens);
}

crumb_code DeviceSequenceLead(crumb_device_worker* worker, const int32_t* tokens, size_t count,
                              const crumb_sequence_options* options, crumb_device_sequence** out,
                              uint32_t* cached_tokens, void* token, size_t token_capacity,
                              size_t* token_bytes) {
  return StartLeading("crumb_device_sequence_lead", worker, tokens, count, options, out,
                      cached_tokens, token, token_capacity, token_bytes);
}

crumb_code DeviceSequenceFollow(crumb_device_worker* worker, const void* token, size_t token_bytes,
                                const int32_t* tokens, size_t count,
                                const crumb_sequence_options* options, crumb_device_sequence** out,
                                uint32_t* cached_tokens) {
  return StartFollowing("crumb_device_sequence_follow", worker, token, token_bytes, tokens, count,
                        options, out, cached_tokens);
}

void DeviceSequenceClose(crumb_device_sequence* sequence) { delete sequence; }

uint32_t DeviceSequenceLength(const crumb_device_sequence* sequence) {
  return static_cast<uint32_t>(sequence->sequence->length());
}

uint32_t DeviceSequencePassTokensMax(const crumb_device_sequence* sequence) {
  return static_cast<uint32_t>(std::max(0, sequence->sequence->pass_tokens_max()));
}

crumb_code DeviceBatchOpen(crumb_device_worker* worker, const crumb_device_batch_options* options,
                           crumb_device_batch** out) {
  return Guarded([&]() -> absl::Status {
    if (out == nullptr) return absl::InvalidArgumentError("crumb_device_batch_open: out is NULL");
    CRUMB_ASSIGN_OR_RETURN(auto batch, worker->worker->NewBatch(OptionsOf(Known(options))));
    *out = new crumb_device_batch{*worker, std::move(batch)};
    return absl::OkStatus();
  });
}

void DeviceBatchClose(crumb_device_batch* batch) { delete batch; }

crumb_code DeviceBatchPrepare(crumb_device_batch* batch, const crumb_pass_entry* entries,
                              size_t count) {
  return Guarded([&]() -> absl::Status {
    std::vector<client::PassEntry> pass;
    for (size_t i = 0; i < count; ++i) {
      if (entries == nullptr || entries[i].sequence == nullptr || entries[i].tokens > INT32_MAX) {
        return absl::InvalidArgumentError("crumb_device_batch_prepare: entry " + std::to_string(i));
      }
      pass.push_back({entries[i].sequence->sequence.get(), static_cast<int>(entries[i].tokens)});
    }
    return batch->batch->Prepare(pass);
  });
}

crumb_code DeviceBatchStart(crumb_device_batch* batch) {
  return Guarded([&] { return batch->batch->Start(); });
}

namespace {

absl::Status CheckLayer(const crumb_device_batch& batch, uint32_t layer, const void* a,
                        const void* b) {
  if (a == nullptr || b == nullptr) return absl::InvalidArgumentError("rows are NULL");
  if (layer < static_cast<uint32_t>(batch.parts.worker->options().own_layers())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("there is no layer " + std::to_string(layer));
}

}  // namespace

crumb_code DeviceBatchAppend(crumb_device_batch* batch, uint32_t layer, const void* k,
                             const void* v) {
  return Guarded([&]() -> absl::Status {
    CRUMB_RETURN_IF_ERROR(CheckLayer(*batch, layer, k, v));
    return batch->batch->Append(static_cast<int>(layer), k, v);
  });
}

crumb_code DeviceBatchAttend(crumb_device_batch* batch, uint32_t layer, const void* q, void* out) {
  return Guarded([&]() -> absl::Status {
    CRUMB_RETURN_IF_ERROR(CheckLayer(*batch, layer, q, out));
    return batch->batch->Attend(static_cast<int>(layer), q, out);
  });
}

crumb_code DeviceBatchAdvance(crumb_device_batch* batch, const int32_t* tokens,
                              const uint32_t* counts, size_t entries) {
  return Guarded([&]() -> absl::Status {
    std::vector<std::span<const int32_t>> kept;
    size_t next = 0;
    for (size_t i = 0; i < entries; ++i) {
      if (counts == nullptr || (tokens == nullptr && counts[i] > 0)) {
        return absl::InvalidArgumentError("crumb_device_batch_advance: counts or tokens is NULL");
      }
      kept.emplace_back(tokens + next, counts[i]);
      next += counts[i];
    }
    return batch->batch->Advance(kept);
  });
}

crumb_code DeviceBatchFork(crumb_device_batch* batch, crumb_device_sequence* sequence,
                           crumb_device_sequence** out) {
  return Guarded([&]() -> absl::Status {
    if (sequence == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_device_batch_fork: sequence or out is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(auto fork, batch->batch->Fork(*sequence->sequence));
    *out = new crumb_device_sequence{sequence->parts, std::move(fork)};
    return absl::OkStatus();
  });
}

crumb_code DeviceBatchFinish(crumb_device_batch* batch, crumb_device_sequence* sequence) {
  return Guarded([&]() -> absl::Status {
    if (sequence == nullptr) {
      return absl::InvalidArgumentError("crumb_device_batch_finish: sequence is NULL");
    }
    return batch->batch->Finish(*sequence->sequence);
  });
}

}  // namespace crumb::c_api
