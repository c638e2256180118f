// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "client/worker/page_pool.h"
#include "client/worker/shared_pages.h"
#include "crumb/acquire.h"
#include "crumb/client.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// A request for the pages of a prefix, or of the rest of one. Refers to the keyspace and the keys.
struct PageRequest {
  // Pages [first, end) of the prompt with these keys.
  PageRequest(const KeyspaceBinding& binding, std::span<const PageKey> keys_of_prompt, int first,
              int end, int window, Duration longest)
      : keyspace(&binding),
        prompt_keys(keys_of_prompt),
        first_page(first),
        keys(prompt_keys.subspan(first, end - first)),
        window_tokens(window),
        timeout(longest) {}

  // The key of the page before page `index` of `keys`; zeros for the first of the prompt.
  PageKey ParentOf(int index) const {
    const int page = first_page + index;
    return page == 0 ? PageKey{} : prompt_keys[page - 1];
  }

  const KeyspaceBinding* keyspace;
  std::span<const PageKey> prompt_keys;
  int first_page;  // position of keys[0] in its sequence
  std::span<const PageKey> keys;
  int window_tokens;         // see AcquireRequest
  Duration timeout;          // zero: host memory only
  bool whole_pages = false;  // only pages with all layers and heads are hits
  uint64_t lease = 0;        // see AcquireRequest
  uint64_t lease_epoch = 0;  // see AcquireRequest
  int skip = 0;              // number of leading keys whose pages the caller has already
  bool behind_miss = false;  // see AcquireRequest
};

// The pages of a prefix in the form that attention reads, held by a lease.
struct FetchedPages {
  std::shared_ptr<const Lease> lease;  // covers all hit pages; null if there is none
  uint64_t lease_id = 0;
  std::vector<Tier> page_tiers;  // one per hit page
  // The hit pages behind PageRequest::skip.
  std::vector<std::shared_ptr<Page>> pages;
  MissReason miss_reason = MissReason::kNone;
  uint64_t bytes = 0;  // size of the tiles of `pages`
};

// PageFetcher acquires this rank's part of pages from crumbd and makes it readable: in place if one
// fragment has all of it, in crumbd's memory or in a shared device pool; otherwise copied
// together and verified. Thread-safe.
//
// It turns one AcquireRequest into pages: leased fragments that contain the rank's layers and heads
// become placed pages without a copy; a page whose tiles lie in several fragments takes page_bytes
// of PagePool and is verified tile by tile while it is copied. A fragment of another format, tile
// size, layout or model shape counts as corrupt.
class PageFetcher {
 public:
  // A fetch that is in flight. Memory that its request refers to must outlive it.
  class PendingFetch {
   public:
    // Returns true if Await will not block.
    bool Ready() { return pending_ == nullptr || pending_->Ready(); }
    // Blocks until crumbd has responded. Returns true if crumbd's index has every requested page.
    bool Await();
    // Returns whether the response has pages that a GPU worker must copy to its device. REQUIRES:
    // Await has returned.
    bool HasCopies() const;

   private:
    friend class PageFetcher;
    PendingFetch(const PageRequest& request, AcquireRequest sent,
                 std::unique_ptr<PendingAcquire> pending)
        : request_(request), sent_(std::move(sent)), pending_(std::move(pending)) {}

    PageRequest request_;
    AcquireRequest sent_;
    std::unique_ptr<PendingAcquire> pending_;  // null once crumbd has responded
    absl::StatusOr<AcquireResult> result_;
  };

  // Everything is borrowed. `shared` may be null, which means no device pools.
  PageFetcher(const WorkerOptions& options, Client& client, PagePool& pool, SharedPages* shared)
      : options_(options), client_(client), pool_(pool), shared_(shared) {}

  // Sends the request.
  PendingFetch Start(const PageRequest& request) const;
  // Returns the leading pages of the request's keys. A page that fails a check is a miss; the
  // status is that of the call.
  //
  // The result may have no pages: then miss_reason says why, as it does for the page behind the
  // last one.
  absl::StatusOr<FetchedPages> Finish(PendingFetch pending) const;
  absl::StatusOr<FetchedPages> Fetch(const PageRequest& request) const {
    return Finish(Start(request));
  }

 private:
  // Attaches a DeferredChecksums to pages whose checksums have not all come.
  void DeferChecksums(const PendingFetch& pending, const AcquireResult& acquired,
                      std::span<const std::shared_ptr<Page>> pages) const;
  // Makes one page readable from its leased fragments: in place, or copied together.
  // kResourceExhausted: there is no memory for a copy; kDataLoss: a fragment does not fit, a copy's
  // checksum differs, or tiles are missing.
  absl::Status Assemble(const std::shared_ptr<const Lease>& lease,
                        std::span<const LeasedFragment> fragments, kernels::PageFormat format,
                        Page& page) const;
  // Holds the leading pages that lie in device pools.
  HeldPages HoldOnDevice(const PageRequest& request,
                         const std::shared_ptr<const Lease>& lease) const;
  // Returns an error if the fragment has another format, tile size, layout or model shape.
  absl::Status CheckFits(const FragmentHeader& header, kernels::PageFormat format) const;

  const WorkerOptions& options_;
  Client& client_;
  PagePool& pool_;
  SharedPages* const shared_;
};

}  // namespace crumb::client
