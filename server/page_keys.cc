// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/page_keys.h"

#include <bit>
#include <cstdint>
#include <vector>

namespace crumb::server {

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

}  // namespace crumb::server
