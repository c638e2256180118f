// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/bpe.h"

#include <queue>
#include <tuple>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace crumb::models {

namespace {

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// A token of the piece being merged, in a doubly linked list over a vector.
struct Symbol {
  int32_t id;  // kMerged: the token is part of the one before it
  int previous;
  int next;
};

constexpr int32_t kMerged = -1;
constexpr int kNone = -1;

// A pair that could be joined when it was found. Pairs are ordered by rank, then from left to
// right.
struct Candidate {
  int32_t rank;
  int left;
  int32_t left_id;
  int32_t right_id;
  int32_t joined_id;

  bool operator<(const Candidate& other) const {
    return std::tie(other.rank, other.left) < std::tie(rank, left);
  }
};

}  // namespace

absl::StatusOr<BytePairs> BytePairs::Build(
    absl::flat_hash_map<std::string, int32_t> tokens,
    const std::vector<std::pair<std::string, std::string>>& merges, bool whole_first,
    int32_t unknown) {
  BytePairs pairs;
  pairs.whole_first_ = whole_first;
  for (int byte = 0; byte < 256; ++byte) {
    const auto it = tokens.find(std::string(1, static_cast<char>(byte)));
    pairs.byte_ids_[byte] = it == tokens.end() ? unknown : it->second;
  }
  pairs.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto left_it = tokens.find(left);
    const auto right_it = tokens.find(right);
    const auto joined_it = tokens.find(left + right);
    if (left_it == tokens.end() || right_it == tokens.end() || joined_it == tokens.end()) {
      return absl::InvalidArgumentError(absl::StrCat("merge ", rank, " of \"", absl::CEscape(left),
                                                     "\" and \"", absl::CEscape(right),
                                                     "\" needs a token that the vocabulary lacks"));
    }
    pairs.merges_.try_emplace(PairKey(left_it->second, right_it->second),
                              Merge{static_cast<int32_t>(rank), joined_it->second});
  }
  pairs.tokens_ = std::move(tokens);
  return pairs;
}

const BytePairs::Merge* BytePairs::FindMerge(int32_t left, int32_t right) const {
  const auto it = merges_.find(PairKey(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void BytePairs::Encode(std::string_view piece, std::vector<int32_t>* ids) const {
  if (whole_first_) {
    if (const auto it = tokens_.find(std::string(piece)); it != tokens_.end()) {
      ids->push_back(it->second);
      return;
    }
  }
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (const char byte : piece) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(byte)];
    if (id < 0) continue;
    const int at = static_cast<int>(symbols.size());
    symbols.push_back({id, at - 1, at + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = kNone;
  const int size = static_cast<int>(symbols.size());
  std::priority_queue<Candidate> candidates;
  const auto consider = [&](int left) {
    const int right = left == kNone ? kNone : symbols[left].next;
    if (right == kNone) return;
    const Merge* merge = FindMerge(symbols[left].id, symbols[right].id);
    if (merge == nullptr) return;
    candidates.push({merge->rank, left, symbols[left].id, symbols[right].id, merge->id});
  };
  for (int i = 0; i < size; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Symbol& left = symbols[best.left];
    // An earlier join may have used either side.
    if (left.id != best.left_id || left.next == kNone || symbols[left.next].id != best.right_id) {
      continue;
    }
    Symbol& right = symbols[left.next];
    left.id = best.joined_id;
    left.next = right.next;
    right.id = kMerged;
    if (left.next != kNone) symbols[left.next].previous = best.left;
    consider(left.previous);
    consider(best.left);
  }
  for (int i = 0; i != kNone && i < size; i = symbols[i].next) ids->push_back(symbols[i].id);
}

}  // namespace crumb::models
