// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/rank_part.h"

#include <algorithm>
#include <string>

namespace crumb::client {
namespace {

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

absl::StatusOr<RankPart> PartOfRank(const RankPlace& place, int layers, int kv_heads, int q_heads) {
  const absl::Status status = CheckPlace(place, layers, kv_heads, q_heads);
  if (!status.ok()) return status;
  const int stage = layers / place.pp_size;
  const int longer = layers % place.pp_size;  // stages with one layer more
  const int first = place.pp_rank * stage + std::min(place.pp_rank, longer);
  const int copies = std::max(1, place.tp_size / kv_heads);  // ranks that hold the same KV head
  const int shares = place.tp_size / copies;
  const int share = place.tp_rank / copies;
  const int queries = q_heads / place.tp_size;
  return RankPart{.layers = RangeOf(first, first + stage + (place.pp_rank < longer ? 1 : 0)),
                  .kv_heads = RangeOf(share * kv_heads / shares, (share + 1) * kv_heads / shares),
                  .q_heads = RangeOf(place.tp_rank * queries, (place.tp_rank + 1) * queries),
                  .publishes = place.tp_rank % copies == 0};
}

}  // namespace crumb::client
