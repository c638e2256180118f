// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/page_key.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

#include "common/hex.h"
#include "common/little_endian.h"  // which tokens are, in memory and hashed

namespace crumb {
namespace {

constexpr std::string_view kPageDomain = "crumb/page/1";
constexpr std::string_view kForeignDomain = "crumb/foreign/1";

uint8_t* Put(uint8_t* out, std::span<const uint8_t> bytes) {
  return std::copy(bytes.begin(), bytes.end(), out);
}

uint8_t* Put(uint8_t* out, std::string_view text) {
  return std::copy(text.begin(), text.end(), out);
}

}  // namespace

const std::array<uint64_t, 4> kDigestHashSecrets = [] {
  std::random_device random;
  std::array<uint64_t, 4> secrets;
  for (uint64_t& secret : secrets) secret = uint64_t{random()} << 32 | random();
  return secrets;
}();

template <typename Tag>
absl::StatusOr<DigestId<Tag>> DigestId<Tag>::FromBytes(std::string_view bytes) {
  DigestId id;
  if (bytes.size() != id.bytes.size()) {
    return absl::InvalidArgumentError("a key or keyspace id has 32 bytes, got " +
                                      std::to_string(bytes.size()));
  }
  std::memcpy(id.bytes.data(), bytes.data(), bytes.size());
  return id;
}

template <typename Tag>
absl::StatusOr<DigestId<Tag>> DigestId<Tag>::FromHex(std::string_view hex) {
  DigestId id;
  if (!HexDecode(hex, id.bytes)) {
    return absl::InvalidArgumentError("a key or keyspace id is written as 64 hexadecimal digits");
  }
  return id;
}

template <typename Tag>
std::string DigestId<Tag>::ToHex() const {
  return HexEncode(bytes);
}

template struct DigestId<PageKeyTag>;
template struct DigestId<KeyspaceIdTag>;

PageKey PageKeyChain::Next(std::span<const int32_t> tokens, const Digest& extra) {
  std::array<uint8_t, kPageDomain.size() + 3 * sizeof(Digest) + 4 * kPageTokens> buffer;
  uint8_t* out = Put(buffer.data(), kPageDomain);
  out = Put(out, keyspace_.bytes);
  out = Put(out, previous_.bytes);
  out = Put(out, extra);
  std::memcpy(out, tokens.data(), 4 * kPageTokens);
  previous_ = PageKey{Sha256(buffer)};
  return previous_;
}

std::vector<PageKey> PageKeysOf(const KeyspaceId& keyspace, std::span<const int32_t> tokens) {
  PageKeyChain chain(keyspace);
  std::vector<PageKey> keys;
  keys.reserve(tokens.size() / kPageTokens);
  for (size_t begin = 0; begin + kPageTokens <= tokens.size(); begin += kPageTokens) {
    keys.push_back(chain.Next(tokens.subspan(begin, kPageTokens)));
  }
  return keys;
}

PageKey ForeignPageKey(const KeyspaceId& keyspace, std::span<const uint8_t> bytes) {
  std::vector<uint8_t> buffer(kForeignDomain.begin(), kForeignDomain.end());
  buffer.insert(buffer.end(), keyspace.bytes.begin(), keyspace.bytes.end());
  buffer.insert(buffer.end(), bytes.begin(), bytes.end());
  return PageKey{Sha256(buffer)};
}

std::optional<size_t> FindDuplicate(std::span<const PageKey> keys) {
  if (keys.size() < 2) return std::nullopt;
  // An open hash table, half empty, of the keys' numbers plus one.
  const size_t size = std::bit_ceil(2 * keys.size());
  std::vector<uint32_t> table(size, 0);
  for (size_t i = 0; i < keys.size(); ++i) {
    size_t place = HashDigest(keys[i].bytes) & (size - 1);
    for (; table[place] != 0; place = (place + 1) & (size - 1)) {
      if (keys[table[place] - 1] == keys[i]) return i;
    }
    table[place] = static_cast<uint32_t>(i + 1);
  }
  return std::nullopt;
}

}  // namespace crumb
