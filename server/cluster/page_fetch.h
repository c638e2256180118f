// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "server/cluster/remote_reader.h"

namespace crumb::server {

// Pages of one node that are to be fetched in one go. All vectors have one element for each page.
struct PageFetch {
  std::shared_ptr<Peer> from;
  std::shared_ptr<Keyspace> keyspace;
  TileRange range;
  transport::SessionToken session{};
  TimePoint deadline;
  storage::Received received = storage::Received::kCopy;
  std::vector<PageKey> keys;
  std::vector<uint32_t> tile_bytes;  // tile size of each page
  std::vector<size_t> names;         // identify each page in calls of `settled`
  std::vector<PageKey> runs = {};    // first page of each one's run, zeros if unknown; or empty
};

// How a page of a fetch ended; kNone: it is in host memory.
using PageSettled = std::function<void(size_t name, MissReason reason)>;

// Reserves room in host memory, fetches, checks and publishes, in as many requests as the
// transport's bound of pages needs. `settled` is called once for each page, on the executor's
// threads or inside the call. Never blocks. `held`, such as a lease at the other node, lives until
// the fetch has ended. The outcome also counts for the node's breaker: silence is a failure, a miss
// is none.
void StartPageFetch(const PullContext& context, const PageFetch& fetch,
                    const std::shared_ptr<const void>& held, const PageSettled& settled);

}  // namespace crumb::server
