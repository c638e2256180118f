// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace crumb::models {

// Byte-pair encoding: a piece of text starts as the tokens of its bytes; then the adjacent pair
// whose merge was learned first is joined, until no pair has a merge. Immutable, so thread-safe.
class BytePairs {
 public:
  // `tokens` has token ids by their bytes, `merges` the pairs in the order in which they were
  // learned. With `whole_first`, a piece that is a token is not merged. A byte without a token
  // becomes the token `unknown`, or is dropped if that is negative, as published tokenizers do.
  // kInvalidArgument: a merge names a token that does not exist.
  static absl::StatusOr<BytePairs> Build(
      absl::flat_hash_map<std::string, int32_t> tokens,
      const std::vector<std::pair<std::string, std::string>>& merges, bool whole_first,
      int32_t unknown = -1);

  // Appends the ids of `piece`. O(n log n) in its bytes.
  void Encode(std::string_view piece, std::vector<int32_t>* ids) const;

 private:
  struct Merge {
    int32_t rank;  // lower is joined earlier
    int32_t id;    // id of the joined token
  };

  // Returns the merge of two adjacent tokens; null: there is none.
  const Merge* FindMerge(int32_t left, int32_t right) const;

  absl::flat_hash_map<std::string, int32_t> tokens_;
  absl::flat_hash_map<uint64_t, Merge> merges_;  // keyed by left id << 32 | right id
  std::array<int32_t, 256> byte_ids_{};          // negative: the byte is dropped
  bool whole_first_ = false;
};

}  // namespace crumb::models
