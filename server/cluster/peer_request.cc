// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_request.h"

#include <cstring>

#include "fmt/format.h"

namespace crumb::server {

absl::StatusOr<std::vector<PageKey>> KeysOf(const std::string& bytes, size_t keys_max) {
  if (bytes.empty() || bytes.size() % sizeof(PageKey) != 0 ||
      bytes.size() / sizeof(PageKey) > keys_max) {
    return absl::InvalidArgumentError(
        fmt::format("{} bytes are no page keys, or more than {}", bytes.size(), keys_max));
  }
  std::vector<PageKey> keys(bytes.size() / sizeof(PageKey));
  std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

absl::StatusOr<TileRange> RangeOf(const Keyspace& keyspace, const v1::TileRange& range) {
  return keyspace.CheckRange(range.layer_begin(), range.layer_end(), range.head_begin(),
                             range.head_end());
}

std::string BudgetOf(const PeerCallContext& context, const v1::PeerCaller& caller) {
  return context.peers.Find(caller.node()) == nullptr ? "" : caller.node();
}

}  // namespace crumb::server
