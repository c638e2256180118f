// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/options.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "client/c_api/handles.h"
#include "common/status_macros.h"
#include "kernels/tile.h"

namespace crumb::c_api {
namespace {

constexpr uint32_t kGroupSizeMax = 128;

absl::Status SetRotation(const std::string& rotation, client::WorkerOptions& options) {
  if (rotation == "identity") return absl::OkStatus();
  if (rotation != "hadamard") return options.UseRotationFile(rotation);
  CRUMB_ASSIGN_OR_RETURN(options.rotations, client::RotationSet::Hadamard(options.head_dim));
  return absl::OkStatus();
}

client::ParallelFor ParallelForOf(const crumb_worker_options& given) {
  if (given.parallel_for == nullptr) return {};
  return [run = given.parallel_for, context = given.parallel_context](
             int count, const std::function<void(int)>& body) {
    run(
        context, count,
        [](void* argument, int32_t index) {
          (*static_cast<const std::function<void(int)>*>(argument))(index);
        },
        const_cast<std::function<void(int)>*>(&body));
  };
}

absl::StatusOr<IndexRange> RangeOf(const char* name, uint32_t begin, uint32_t end) {
  if (end > UINT16_MAX || begin > end || (begin == end && end != 0)) {
    return absl::InvalidArgumentError(std::string("crumb_worker_options: ") + name +
                                      "_begin and _end are no range");
  }
  return IndexRange{static_cast<uint16_t>(begin), static_cast<uint16_t>(end)};
}

absl::Status SetPart(const crumb_worker_options& given, client::RankPart& part) {
  CRUMB_ASSIGN_OR_RETURN(part.layers, RangeOf("layer", given.layer_begin, given.layer_end));
  CRUMB_ASSIGN_OR_RETURN(part.kv_heads, RangeOf("head", given.head_begin, given.head_end));
  CRUMB_ASSIGN_OR_RETURN(part.q_heads, RangeOf("q_head", given.q_head_begin, given.q_head_end));
  part.publishes = given.publishes_nothing == 0;
  return absl::OkStatus();
}

// Copies arrays, whose sizes the other options give.
absl::Status SetAttention(const crumb_worker_options& given, client::WorkerOptions& options) {
  if (given.windows == nullptr && given.sink_logits == nullptr) return absl::OkStatus();
  CRUMB_RETURN_IF_ERROR(options.Validate());
  const size_t layers = given.layers;
  for (size_t i = 0; given.windows != nullptr && i < layers; ++i) {
    options.windows.push_back(static_cast<int>(std::min<uint32_t>(given.windows[i], INT32_MAX)));
  }
  if (given.sink_logits != nullptr) {
    options.sink_logits.assign(given.sink_logits, given.sink_logits + layers * given.q_heads);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<client::WorkerOptions> OptionsOf(const crumb_worker_options& given) {
  client::WorkerOptions options;
  options.model = Text(given.model);
  options.weights = Text(given.weights);
  options.layers = static_cast<int>(given.layers);
  options.kv_heads = static_cast<int>(given.kv_heads);
  options.q_heads = static_cast<int>(given.q_heads);
  options.head_dim = static_cast<int>(given.head_dim);
  options.group_size = static_cast<int>(
      given.group_size != 0 ? given.group_size : std::min(kGroupSizeMax, given.head_dim));
  if (given.history_bf16 != 0) options.history_format = kernels::PageFormat::kBf16;
  CRUMB_RETURN_IF_ERROR(SetRotation(Text(given.rotation, "hadamard"), options));
  options.rope = Text(given.rope);
  if (given.prefill_block != 0) options.prefill_block = static_cast<int>(given.prefill_block);
  options.tenant = Text(given.tenant);
  for (size_t i = 0; i < given.fields; ++i) options.fields[given.names[i]] = given.values[i];
  if (given.recent_tokens != 0) options.recent_tokens = static_cast<int>(given.recent_tokens);
  options.scale = given.scale;
  options.soft_cap = given.soft_cap;
  if (given.page_bytes_max != 0) options.page_bytes_max = given.page_bytes_max;
  if (given.begin_deadline_ms != 0) {
    options.begin_deadline = std::chrono::milliseconds(given.begin_deadline_ms);
  }
  options.parallel_for = ParallelForOf(given);
  CRUMB_RETURN_IF_ERROR(SetPart(given, options.part));
  CRUMB_RETURN_IF_ERROR(SetAttention(given, options));
  return options;
}

absl::StatusOr<client::SequenceOptions> OptionsOf(const crumb_sequence_options& given) {
  client::SequenceOptions options;
  if (given.extra_pages > 0 && given.extra == nullptr) {
    return absl::InvalidArgumentError("crumb_sequence_options: extra is NULL");
  }
  for (size_t i = 0; i < given.extra_pages; ++i) {
    Digest digest;
    std::copy_n(given.extra + i * digest.size(), digest.size(), digest.begin());
    options.extra.push_back(digest);
  }
  if (given.publish > 2) return absl::InvalidArgumentError("publish must be 0, 1 or 2");
  constexpr client::Publish kPublish[] = {client::Publish::kAll, client::Publish::kPrompt,
                                          client::Publish::kNone};
  options.publish = kPublish[given.publish];
  if (given.deadline_ms != 0) options.deadline = std::chrono::milliseconds(given.deadline_ms);
  if (given.host_memory_only != 0) options.deadline = Duration::zero();
  if (given.cached_tokens_max_plus_one > INT32_MAX) {
    return absl::InvalidArgumentError("cached_tokens_max_plus_one is above 2^31 - 1");
  }
  if (given.cached_tokens_max_plus_one != 0) {
    options.cached_tokens_max = static_cast<int>(given.cached_tokens_max_plus_one - 1);
  }
  return options;
}

absl::Status WriteCounters(const client::WorkerCounters& now, crumb_worker_counters* out) {
  if (out == nullptr) return absl::InvalidArgumentError("crumb_worker_counters is NULL");
  const crumb_worker_counters counters = {
      .size = out->size,
      .sequences = now.sequences,
      .prompt_tokens = now.prompt_tokens,
      .hit_tokens_worker = now.hit_tokens_worker,
      .hit_tokens_host = now.hit_tokens_host,
      .hit_tokens_ssd = now.hit_tokens_ssd,
      .hit_tokens_remote = now.hit_tokens_remote,
      .verify_failures = now.verify_failures,
      .deadline_exceeded = now.deadline_exceeded,
      .unavailable = now.unavailable,
      .windows_evicted = now.windows_evicted,
      .windows_refused = now.windows_refused,
      .published_pages = now.published_pages,
      .deduplicated_pages = now.deduplicated_pages,
      .publish_refused = now.publish_refused,
      .publish_dropped =
          now.publish_dropped_queue + now.publish_dropped_room + now.publish_dropped_unavailable,
      .windows_measured = now.windows_measured,
      .quality_alarms = now.quality_alarms,
      .hit_tokens_device = now.hit_tokens_device,
      .pool_pages = now.pool_pages,
  };
  std::memcpy(out, &counters, std::min(out->size, sizeof(counters)));
  return absl::OkStatus();
}

}  // namespace crumb::c_api
