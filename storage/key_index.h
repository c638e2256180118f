// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "common/page_key.h"

namespace crumb::storage {

// Numbers by page key. A hash map in parts, because a map that grows moves all its entries at once:
// a part of an index of four million pages does so in about a millisecond. Not thread-safe.
class KeyIndex {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // kNone: the key is absent.
  uint32_t Find(const PageKey& key) const {
    const size_t hash = absl::Hash<PageKey>()(key);
    const Part& part = parts_[PartOf(hash)];
    const auto found = part.find(key, hash);
    return found == part.end() ? kNone : found->second;
  }
  // Brings the key's place to the processor's cache, ahead of Find.
  void Prefetch(const PageKey& key) const {
    parts_[PartOf(absl::Hash<PageKey>()(key))].prefetch(key);
  }
  // REQUIRES: the key is absent.
  void Insert(const PageKey& key, uint32_t number) {
    parts_[PartOf(absl::Hash<PageKey>()(key))].emplace(key, number);
    ++size_;
  }
  // REQUIRES: the key is there.
  void Erase(const PageKey& key) {
    parts_[PartOf(absl::Hash<PageKey>()(key))].erase(key);
    --size_;
  }

  size_t size() const { return size_; }
  // Visits the numbers, in no order, until `visit` returns false.
  void ForEach(absl::FunctionRef<bool(uint32_t)> visit) const {
    for (const Part& part : parts_) {
      for (const auto& [key, number] : part) {
        if (!visit(number)) return;
      }
    }
  }

 private:
  using Part = absl::flat_hash_map<PageKey, uint32_t>;
  static constexpr size_t kPartBits = 6;

  // The map itself uses the lower bits.
  static size_t PartOf(size_t hash) { return hash >> (8 * sizeof(size_t) - kPartBits); }

  std::array<Part, size_t{1} << kPartBits> parts_;
  size_t size_ = 0;
};

}  // namespace crumb::storage
