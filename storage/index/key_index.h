// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "common/page_key.h"

namespace crumb::storage {

// Numbers by page key: the pages of a keyspace, and the places of absent pages (PageSpace). A hash
// map in parts, because a map that grows moves all its entries at once: a part of an index of four
// million pages does so in about a millisecond. A caller that looks up many keys hashes each once
// and prefetches its place some keys ahead. Not thread-safe: the tier's lock covers it.
class KeyIndex {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // A key with its hash, which Prefetch and Find need alike. Borrows the key.
  struct Hashed {
    const PageKey* key = nullptr;
    size_t hash = 0;
  };
  static Hashed Hash(const PageKey& key) { return {&key, HashDigest(key.bytes)}; }

  // kNone: the key is absent.
  uint32_t Find(const Hashed& key) const {
    const Part& part = parts_[PartOf(key.hash)];
    const auto found = part.find(key, key.hash);
    return found == part.end() ? kNone : found->second;
  }
  uint32_t Find(const PageKey& key) const { return Find(Hash(key)); }
  // Brings the key's place to the processor's cache, ahead of Find.
  void Prefetch(const Hashed& key) const { parts_[PartOf(key.hash)].prefetch(key); }
  // REQUIRES: the key is absent.
  void Insert(const PageKey& key, uint32_t number) {
    parts_[PartOf(Hash(key).hash)].emplace(key, number);
    ++size_;
  }
  // REQUIRES: the key is there.
  void Erase(const PageKey& key) {
    const Hashed hashed = Hash(key);
    parts_[PartOf(hashed.hash)].erase(hashed);
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
  // The keyed hash as it is: absl::Hash would mix it once more, behind a call.
  struct HashOf {
    using is_transparent = void;
    size_t operator()(const PageKey& key) const { return HashDigest(key.bytes); }
    size_t operator()(const Hashed& key) const { return key.hash; }
  };
  struct Same {
    using is_transparent = void;
    // By words: a look-up compares keys, and a call of memcmp costs more than these.
    bool operator()(const PageKey& a, const PageKey& b) const {
      uint64_t different = 0;
      for (size_t at = 0; at < sizeof(Digest); at += sizeof(uint64_t)) {
        different |= WordAt(a, at) ^ WordAt(b, at);
      }
      return different == 0;
    }
    bool operator()(const PageKey& a, const Hashed& b) const { return (*this)(a, *b.key); }

   private:
    static uint64_t WordAt(const PageKey& key, size_t at) {
      uint64_t word;
      std::memcpy(&word, key.bytes.data() + at, sizeof(word));
      return word;
    }
  };
  using Part = absl::flat_hash_map<PageKey, uint32_t, HashOf, Same>;
  static constexpr size_t kPartBits = 6;

  // The map itself uses the lower bits.
  static size_t PartOf(size_t hash) { return hash >> (8 * sizeof(size_t) - kPartBits); }

  std::array<Part, size_t{1} << kPartBits> parts_;
  size_t size_ = 0;
};

}  // namespace crumb::storage
