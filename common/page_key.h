// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/sha256.h"

namespace crumb {

inline constexpr int kPageTokens = 64;

// Random numbers of this process that keep the places of digests in hash maps unforeseeable:
// clients choose page keys, and keys that all fell into one place would make every lookup a walk
// over them.
extern const std::array<uint64_t, 4> kDigestHashSecrets;

// A hash over all of a digest's bytes, keyed with kDigestHashSecrets.
inline uint64_t HashDigest(const Digest& bytes) {
  std::array<uint64_t, 4> words;
  static_assert(sizeof(words) == sizeof(Digest));
  std::memcpy(words.data(), bytes.data(), sizeof(words));
  const auto fold = [](uint64_t a, uint64_t b) {
    __extension__ const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  return fold(words[0] ^ kDigestHashSecrets[0], words[1] ^ kDigestHashSecrets[1]) ^
         fold(words[2] ^ kDigestHashSecrets[2], words[3] ^ kDigestHashSecrets[3]);
}

// 32 bytes that name a page (or a keyspace): a SHA-256 digest, compared by value.
template <typename Tag>
struct DigestId {
  Digest bytes{};

  static absl::StatusOr<DigestId> FromBytes(std::string_view bytes);
  static absl::StatusOr<DigestId> FromHex(std::string_view hex);
  std::string_view view() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::string ToHex() const;

  friend auto operator<=>(const DigestId&, const DigestId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const DigestId& id) {
    return H::combine(std::move(h), HashDigest(id.bytes));
  }
};

// Names a page by all that its bytes depend on: docs/formats/page-key.md.
using PageKey = DigestId<struct PageKeyTag>;
// Names a keyspace: docs/formats/keyspace.md.
using KeyspaceId = DigestId<struct KeyspaceIdTag>;

extern template struct DigestId<PageKeyTag>;
extern template struct DigestId<KeyspaceIdTag>;

// Makes the keys of one sequence's pages in order.
class PageKeyChain {
 public:
  explicit PageKeyChain(const KeyspaceId& keyspace) : keyspace_(keyspace) {}
  // Goes on behind the page of key `previous`.
  PageKeyChain(const KeyspaceId& keyspace, const PageKey& previous)
      : keyspace_(keyspace), previous_(previous) {}

  // The key of the next page. `tokens` holds kPageTokens ids. `extra` is the digest of whatever
  // else the page depends on (cache salt, images), zeros for nothing.
  PageKey Next(std::span<const int32_t> tokens, const Digest& extra = {});

 private:
  KeyspaceId keyspace_;
  PageKey previous_{};
};

// Keys of all full pages of `tokens`.
std::vector<PageKey> PageKeysOf(const KeyspaceId& keyspace, std::span<const int32_t> tokens);

// The key of a page that an engine names by bytes of its own.
PageKey ForeignPageKey(const KeyspaceId& keyspace, std::span<const uint8_t> bytes);

// Returns the index of the first key that is equal to one before it, or nothing if each key occurs
// once. Takes O(keys) time.
std::optional<size_t> FindDuplicate(std::span<const PageKey> keys);

}  // namespace crumb

template <typename Tag>
struct std::hash<crumb::DigestId<Tag>> {
  size_t operator()(const crumb::DigestId<Tag>& id) const { return crumb::HashDigest(id.bytes); }
};
