// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "server/cluster/home_inquiry.h"
#include "server/cluster/page_fetch.h"
#include "server/cluster/remote_reader.h"

namespace crumb::server {

// One RemoteReader::Pull: leases the pages at other nodes and fetches a run as soon as a node has
// all of it, or every home and every node that they referred to has responded; ends when the
// prefix's end is known. Its own callbacks keep it alive, also after `done`, until the fetches
// under way have ended. Thread-safe.
//
// The life of a page: kOpen until it is in host memory (kHere) or known to be missing (kMissing). A
// page that another operation is fetching already is not requested again; this one waits for that
// (PageFlights).
class PullOperation final : public HomeInquiry {
 public:
  using Done = std::function<void(PullResult)>;

  // `done` is called once: at the end of the prefix, or at the request's deadline with the pages
  // that are there.
  PullOperation(const PullContext& context, PullRequest request, Done done);

  // Begins. REQUIRES: a shared pointer owns this.
  void Start();

 private:
  enum class PageState : uint8_t { kOpen, kHere, kMissing };

  // A lease at a peer, given back with the last reference.
  struct Lease;

  // The longest prefix of a run's pages that a node has leased to this one.
  struct Source {
    bool fetching = false;
    std::shared_ptr<Peer> from;
    std::shared_ptr<Lease> lease;
    transport::SessionToken session{};
    std::vector<uint32_t> tile_bytes;
  };

  // Finds the pages that this node lacks and claims those that no other operation is fetching.
  void ClaimPages();
  void Prepare(v1::PeerAcquireRequest* message) const override;
  void NoteHits(const std::shared_ptr<Peer>& peer, const std::vector<size_t>& runs,
                const v1::PeerAcquireResponse& response) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns false for runs that are fetched from a node already, and after the request has ended.
  bool Wants(size_t run) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return done_ != nullptr && !sources_[run].fetching;
  }
  // Starts the fetches that are possible now for `runs`.
  void Progress(const std::vector<size_t>& runs) override;
  // Removes from `runs` the fetches that can start now, and returns them.
  std::vector<PageFetch> TakeFetches(const std::vector<size_t>& runs,
                                     std::vector<std::shared_ptr<Lease>>* leases)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes the outcome of a page; the first one counts. Then notifies operations that wait for it
  // and ends the request if the prefix's end is known.
  void Settle(size_t page, MissReason reason);
  void SettleLocked(size_t page, MissReason reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The deadline: ends the request with the pages that are there.
  void Expire();
  // Ends the wait when the end of the prefix is known.
  void FinishIfKnown();
  // Notifies other operations of settled pages, without the lock.
  void Land();

  Done done_ ABSL_GUARDED_BY(mutex_);
  std::vector<Source> sources_ ABSL_GUARDED_BY(mutex_);  // [runs_] the source of each run
  std::vector<PageState> states_ ABSL_GUARDED_BY(mutex_);
  std::vector<MissReason> reasons_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> own_ ABSL_GUARDED_BY(mutex_);
  std::vector<size_t> to_land_ ABSL_GUARDED_BY(mutex_);  // settled, not reported to others yet
  std::optional<storage::DeadlineTimer::Id> timer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
