// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "client/worker/page_intake.h"
#include "client/worker/page_pool.h"
#include "crumb/acquire.h"
#include "crumb/client.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// A prefix, or the rest of one, to be fetched.
struct PageRequest {
  const KeyspaceBinding* keyspace = nullptr;
  int first_page = 0;  // position of keys[0] in its sequence
  PageKey parent;      // of keys[0]
  PageKey run;         // see AcquireRequest
  std::span<const PageKey> keys;
  int window_tokens = 0;                // see AcquireRequest
  Duration timeout = Duration::zero();  // zero: host memory only
  bool whole_pages = false;             // hit only where all layers and heads are there
  uint64_t lease = 0;                   // see AcquireRequest
  uint64_t lease_epoch = 0;             // see AcquireRequest
  int skip = 0;                         // leading keys whose pages the caller has
  bool behind_miss = false;             // see AcquireRequest
};

// Pages of a prefix as attention reads them, still under crumbd's lease.
struct FetchedPages {
  std::shared_ptr<const Lease> lease;  // of all hit pages; null without hit
  uint64_t lease_id = 0;
  std::vector<Tier> page_tiers;  // of all hit pages
  // Those behind PageRequest::skip.
  std::vector<std::shared_ptr<Page>> pages;
  MissReason miss_reason = MissReason::kNone;
  uint64_t bytes = 0;  // of all tiles
};

// Asks crumbd for this rank's part of pages and makes it readable: in place where one fragment
// holds all of it, in crumbd's memory or a device pool of the intake's, else copied together and
// verified. Thread-safe.
class PageFetcher {
 public:
  // What was asked for and has not been read yet. What its request points to must outlive it.
  class PendingFetch {
   public:
    // Whether Await will not block.
    bool Ready() { return pending_ == nullptr || pending_->Ready(); }
    // Waits for crumbd's answer. True: all pages are there, as far as crumbd knows.
    bool Await();
    // Of an answer: whether pages are there that no sequence attends where they lie, were they in
    // device memory.
    bool HasCopies() const;

   private:
    friend class PageFetcher;
    PendingFetch(const PageRequest& request, AcquireRequest sent,
                 std::unique_ptr<PendingAcquire> pending)
        : request_(request), sent_(std::move(sent)), pending_(std::move(pending)) {}

    PageRequest request_;
    AcquireRequest sent_;
    std::unique_ptr<PendingAcquire> pending_;  // null: answered
    absl::StatusOr<AcquireResult> result_;
  };

  // All borrowed; `intake` may be null: no device pools.
  PageFetcher(const WorkerOptions& options, Client& client, PagePool& pool, PageIntake* intake)
      : options_(options), client_(client), pool_(pool), intake_(intake) {}

  // Sends the question.
  PendingFetch Start(const PageRequest& request) const;
  // Leading pages of the request's keys. The status is the call's; what failed a check is a miss.
  absl::StatusOr<FetchedPages> Finish(PendingFetch pending) const;
  absl::StatusOr<FetchedPages> Fetch(const PageRequest& request) const {
    return Finish(Start(request));
  }

 private:
  void DeferChecksums(const PendingFetch& pending, const AcquireResult& acquired,
                      std::span<const std::shared_ptr<Page>> pages) const;
  absl::Status Assemble(const std::shared_ptr<const Lease>& lease,
                        std::span<const LeasedFragment> fragments, kernels::PageFormat format,
                        Page& page) const;
  HeldPages HoldOnDevice(const PageRequest& request,
                         const std::shared_ptr<const Lease>& lease) const;
  absl::StatusOr<const DeviceFragment*> Choose(std::span<const DeviceFragment> fragments,
                                               kernels::PageFormat format) const;
  absl::Status CheckFits(const FragmentHeader& header, kernels::PageFormat format) const;

  const WorkerOptions& options_;
  Client& client_;
  PagePool& pool_;
  PageIntake* const intake_;
};

}  // namespace crumb::client
