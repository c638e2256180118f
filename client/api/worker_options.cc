// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/worker_options.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "common/page_key.h"
#include "common/rotation_file.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

absl::Status Wrong(const std::string& field, const std::string& rule) {
  return absl::InvalidArgumentError("WorkerOptions." + field + " " + rule);
}

absl::Status CheckPart(const WorkerOptions& options) {
  const TileRange own = options.own_tiles();
  const TileRange all = options.all_tiles();
  if (own.layers.size() < 1 || !all.layers.Contains(own.layers)) {
    return Wrong("part.layers", "must be layers of the model");
  }
  if (own.heads.size() < 1 || !all.heads.Contains(own.heads)) {
    return Wrong("part.kv_heads", "must be KV heads of the model");
  }
  const IndexRange queries = options.own_q_head_range();
  const int group = options.q_heads / options.kv_heads;
  const bool whole =
      queries.begin == own.heads.begin * group && queries.end == own.heads.end * group;
  const bool share = own.heads.size() == 1 && queries.size() > 0 &&
                     queries.begin >= own.heads.begin * group &&
                     queries.end <= own.heads.end * group;
  if (!whole && !share) {
    return Wrong("part.q_heads", "must be those of part.kv_heads, or some of those of one KV head");
  }
  return absl::OkStatus();
}

absl::Status CheckAttention(const WorkerOptions& options) {
  const auto layers = static_cast<size_t>(options.layers);
  if (!options.windows.empty() && options.windows.size() != layers) {
    return Wrong("windows", "must be empty or have one entry per layer");
  }
  for (const int window : options.windows) {
    if (window < 0) return Wrong("windows", "must be at least 0");
  }
  if (!options.sink_logits.empty() && options.sink_logits.size() != layers * options.q_heads) {
    return Wrong("sink_logits", "must be empty or have one entry per layer and query head");
  }
  for (const float logit : options.sink_logits) {
    if (!std::isfinite(logit)) return Wrong("sink_logits", "must be finite");
  }
  return absl::OkStatus();
}

bool Divides(int a, int b) { return b % a == 0; }

IndexRange RangeOf(int begin, int end) {
  return {static_cast<uint16_t>(begin), static_cast<uint16_t>(end)};
}

absl::Status CheckPlace(const RankPlace& place, int layers, int kv_heads, int q_heads) {
  if (place.tp_rank < 0 || place.tp_rank >= place.tp_size || place.pp_rank < 0 ||
      place.pp_rank >= place.pp_size) {
    return absl::InvalidArgumentError("a rank must be less than its size");
  }
  if (layers < 1 || layers > UINT16_MAX || place.pp_size > layers) {
    return absl::InvalidArgumentError(std::to_string(place.pp_size) + " stages of " +
                                      std::to_string(layers) + " layers");
  }
  const int tp = place.tp_size;
  const bool heads = kv_heads >= 1 && q_heads >= kv_heads && q_heads <= UINT16_MAX;
  if (!heads || !Divides(kv_heads, q_heads) || !Divides(tp, q_heads) ||
      (!Divides(tp, kv_heads) && !Divides(kv_heads, tp))) {
    return absl::InvalidArgumentError(std::to_string(tp) + " tensor-parallel ranks cannot share " +
                                      std::to_string(kv_heads) + " KV heads and " +
                                      std::to_string(q_heads) + " query heads equally");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WorkerOptions::UseRotationFile(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(const RotationFile file, ReadRotationFile(path));
  const auto named = kernels::MethodNamed(file.method);
  if (!named) {
    return absl::InvalidArgumentError(path + ": method \"" + file.method + "\" is not known");
  }
  CRUMB_ASSIGN_OR_RETURN(rotations, RotationSet::FromFile(file, path));
  method = *named;
  clip_k = file.clip_k;
  clip_v = file.clip_v;
  v_basis = file.v_basis;
  return absl::OkStatus();
}

TileRange WorkerOptions::own_tiles() const {
  const TileRange all = all_tiles();
  return {part.layers == IndexRange{} ? all.layers : part.layers,
          part.kv_heads == IndexRange{} ? all.heads : part.kv_heads};
}

IndexRange WorkerOptions::own_q_head_range() const {
  if (part.q_heads != IndexRange{}) return part.q_heads;
  const IndexRange heads = own_tiles().heads;
  const int group = q_heads / kv_heads;
  return {static_cast<uint16_t>(heads.begin * group), static_cast<uint16_t>(heads.end * group)};
}

int WorkerOptions::own_window(int layer) const {
  return windows.empty() ? 0 : windows[own_tiles().layers.begin + layer];
}

std::vector<float> WorkerOptions::own_sink_logits() const {
  std::vector<float> own;
  if (sink_logits.empty()) return own;
  const IndexRange own_layers = own_tiles().layers, heads = own_q_head_range();
  for (int layer = own_layers.begin; layer < own_layers.end; ++layer) {
    const float* const logits = sink_logits.data() + int64_t{layer} * q_heads;
    own.insert(own.end(), logits + heads.begin, logits + heads.end);
  }
  return own;
}

double WorkerOptions::watch_error_bound() const {
  if (watch_error_max <= 0.0f) return 0.0;
  const std::optional<double> expected = rotations.ExpectedAttentionError(own_tiles());
  const bool relative = watch_error_factor > 0.0f && expected.has_value();
  return relative ? watch_error_factor * *expected : double{watch_error_max};
}

absl::Status WorkerOptions::Validate() const {
  if (model.empty()) return Wrong("model", "is empty");
  if (weights.empty()) return Wrong("weights", "is empty: pages of other weights would be used");
  if (layers < 1 || layers > 1024) return Wrong("layers", "must be 1 to 1,024");
  if (kv_heads < 1 || kv_heads > 1024) return Wrong("kv_heads", "must be 1 to 1,024");
  if (q_heads < kv_heads || q_heads % kv_heads != 0 ||
      q_heads / kv_heads > kernels::kMaxQueryHeadsPerKvHead) {
    return Wrong("q_heads",
                 "must be kv_heads times 1 to " + std::to_string(kernels::kMaxQueryHeadsPerKvHead));
  }
  if (!tile_shape().Valid()) {
    return Wrong("head_dim", "must be 64, 128 or 256, group_size 32, 64 or 128 and at most that");
  }
  if (history_format != kernels::PageFormat::kInt2 &&
      history_format != kernels::PageFormat::kBf16) {
    return Wrong("history_format", "must be kInt2 or kBf16");
  }
  if (clip_k > 1.0f || clip_v > 1.0f) return Wrong("clip_k, clip_v", "must be at most 1");
  if (v_basis != "model" && v_basis != "rotated") {
    return Wrong("v_basis", "must be model or rotated");
  }
  if (recent_tokens < kPageTokens || recent_tokens % kPageTokens != 0) {
    return Wrong("recent_tokens", "must be a multiple of 64");
  }
  if (prefill_block % kPageTokens != 0 || prefill_block < recent_tokens + kPageTokens) {
    return Wrong("prefill_block", "must be a multiple of 64 and hold a full window");
  }
  CRUMB_RETURN_IF_ERROR(CheckPart(*this));
  CRUMB_RETURN_IF_ERROR(CheckAttention(*this));
  if (draft_slots < 0 || draft_slots >= kPageTokens) return Wrong("draft_slots", "must be 0 to 63");
  if (watch_windows < 1) return Wrong("watch_windows", "must be at least 1");
  if (publish_queue_max < 1) return Wrong("publish_queue_max", "must be at least 1");
  if (publish_batch < 1) return Wrong("publish_batch", "must be at least 1");
  return rotations.CheckFits(layers, kv_heads, q_heads, head_dim);
}

absl::StatusOr<RankPart> PartOfRank(const RankPlace& place, int layers, int kv_heads, int q_heads) {
  const absl::Status status = CheckPlace(place, layers, kv_heads, q_heads);
  if (!status.ok()) return status;
  const int stage = layers / place.pp_size;
  const int longer = layers % place.pp_size;  // number of stages with one layer more
  const int first = place.pp_rank * stage + std::min(place.pp_rank, longer);
  // number of ranks that hold the same KV head
  const int copies = std::max(1, place.tp_size / kv_heads);
  const int shares = place.tp_size / copies;
  const int share = place.tp_rank / copies;
  const int queries = q_heads / place.tp_size;
  return RankPart{.layers = RangeOf(first, first + stage + (place.pp_rank < longer ? 1 : 0)),
                  .kv_heads = RangeOf(share * kv_heads / shares, (share + 1) * kv_heads / shares),
                  .q_heads = RangeOf(place.tp_rank * queries, (place.tp_rank + 1) * queries),
                  .publishes = place.tp_rank % copies == 0};
}

}  // namespace crumb::client
