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

// DeferredChecksums fetches the tile checksums of pages whose Acquire returned those of some tiles
// only (AcquireRequest::peer_sums), so that the first layers could be copied early. It requests all
// checksums with another Acquire of the same lease. Used by one thread at a time.
//
// All pages of one Acquire share one object through Page::deferred_checksums. Holding it holds the
// lease, so that the pages cannot be evicted before they are checked.
class DeferredChecksums {
 public:
  // `client` is borrowed. `request` is the first Acquire; its keys are copied. `own` are the tiles
  // that the pages have.
  DeferredChecksums(Client& client, const AcquireRequest& request,
                    std::shared_ptr<const Lease> lease, uint64_t lease_id, const TileRange& own);

  // Returns the position of the first requested page in its sequence; Fill counts from it.
  int first_page() const { return static_cast<int>(request_.first_page); }

  // Sends the request, the first time, and blocks until crumbd has responded or the timeout of the
  // first request, but at least 200 ms, has passed. kNotFound: crumbd does not have the lease any
  // more.
  absl::Status Await();
  // Sets all checksums of the page of key `index`. Returns false if the response lacks them.
  bool Fill(int index, Page& page) const;

 private:
  Client& client_;
  const std::vector<PageKey> keys_;
  AcquireRequest request_;
  const std::shared_ptr<const Lease> lease_;  // the lease of the first Acquire
  const TileRange own_;
  absl::StatusOr<std::shared_ptr<const Lease>> full_lease_;  // null until the response
};

// Returns the checksums of the tiles `own` from those of a fragment that covers `range`. REQUIRES:
// `range` contains `own`.
std::vector<uint32_t> OwnSums(const TileRange& range, std::span<const uint32_t> sums,
                              const TileRange& own);

// Sets the checksums of the tiles `own` in `page` from a fragment in a device pool. REQUIRES: the
// fragment contains `own`, and its checksums are complete.
void TakeSums(const DeviceFragment& fragment, const TileRange& own, Page& page);

}  // namespace crumb::client
