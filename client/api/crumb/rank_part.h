// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/statusor.h"
#include "common/fragment_header.h"

namespace crumb::client {

// The part of a model that one rank of an engine holds. An empty range means all.
struct RankPart {
  IndexRange layers;      // of its pages
  IndexRange kv_heads;    // global
  IndexRange q_heads;     // global; of the groups of its KV heads
  bool publishes = true;  // false: another rank publishes the same tiles
  friend bool operator==(const RankPart&, const RankPart&) = default;
};

// A rank's place in an engine of tp_size * pp_size ranks.
struct RankPlace {
  int tp_rank = 0;
  int tp_size = 1;
  int pp_rank = 0;
  int pp_size = 1;
};

// The part that engines give to a rank. Layers: consecutive stages of equal size, the first ones
// with one layer more when they do not divide. Heads: equal shares; with more tensor-parallel ranks
// than KV heads, consecutive ranks hold the same KV head and share its query heads, and the lowest
// of them publishes. For an engine that cuts another way, fill in RankPart oneself.
// kInvalidArgument: a rank outside its size, more stages than layers, heads that do not divide.
absl::StatusOr<RankPart> PartOfRank(const RankPlace& place, int layers, int kv_heads, int q_heads);

}  // namespace crumb::client
