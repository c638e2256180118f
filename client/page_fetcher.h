// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "client/keyspace_binding.h"
#include "client/page.h"
#include "client/page_pool.h"
#include "crumb/acquire.h"
#include "crumb/client.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// Pages of a prefix as attention reads them, still under crumbd's lease.
struct FetchedPages {
  std::vector<std::shared_ptr<Page>> pages;
  std::vector<Tier> tiers;  // of each
  MissReason miss_reason = MissReason::kNone;
  uint64_t bytes = 0;  // of all tiles
};

// Asks crumbd for pages and makes them readable: in place where one fragment holds a whole page,
// else copied together and verified. Thread-safe.
class PageFetcher {
 public:
  // All borrowed.
  PageFetcher(const WorkerOptions& options, Client& client, PagePool& pool)
      : options_(options), client_(client), pool_(pool) {}

  // Leading pages of `keys`, the first of which is page `first_page` of its sequence and follows
  // `parent`, in the run that begins with `run`. `window_tokens`: see AcquireRequest. Zero
  // `timeout`: host memory only. The status is the call's; what failed a check is a miss.
  absl::StatusOr<FetchedPages> Fetch(const KeyspaceBinding& keyspace, int first_page,
                                     const PageKey& parent, const PageKey& run,
                                     std::span<const PageKey> keys, int window_tokens,
                                     Duration timeout) const;

 private:
  absl::StatusOr<std::shared_ptr<Page>> Assemble(const std::shared_ptr<const Lease>& lease,
                                                 std::span<const LeasedFragment> fragments,
                                                 kernels::PageFormat format) const;

  const WorkerOptions& options_;
  Client& client_;
  PagePool& pool_;
};

}  // namespace crumb::client
