// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/worker/page.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/acquire.h"
#include "crumb/client.h"

namespace crumb::client {

// The tile sums of fetched pages that an answer told some of only (AcquireRequest::peer_sums), so
// that the first layers could begin to come: all of them are asked for by the answer's lease. One
// thread at a time.
class DeferredChecksums {
 public:
  // `client` is borrowed. `asked` is what the answer was to; of its keys a copy is kept. `own` are
  // the tiles that pages have.
  DeferredChecksums(Client& client, const AcquireRequest& request,
                    std::shared_ptr<const Lease> lease, uint64_t lease_id, const TileRange& own);

  int first_page() const { return static_cast<int>(request_.first_page); }

  // Asks, the first time, and blocks until that is answered or the time of `asked` is over, of
  // which 200 ms are left at least. kNotFound: crumbd does not have the lease any more.
  absl::Status Await();
  // Gives a page all its sums, that of key `index`. False: they were not told.
  bool Fill(int index, Page& page) const;

 private:
  Client& client_;
  const std::vector<PageKey> keys_;
  AcquireRequest request_;
  const std::shared_ptr<const Lease> lease_;  // joined once more by the question
  const TileRange own_;
  absl::StatusOr<std::shared_ptr<const Lease>> full_lease_;  // null: not asked
};

// Those of the tiles `own`, of the sums of a fragment of `range`, which has all of them.
std::vector<uint32_t> OwnSums(const TileRange& range, std::span<const uint32_t> sums,
                              const TileRange& own);

// Gives `page` the sums of the tiles `own` of a fragment in a device pool that has them, and all of
// whose sums are told.
void TakeSums(const DeviceFragment& fragment, const TileRange& own, Page& page);

}  // namespace crumb::client
