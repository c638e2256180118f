// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/cluster/home_requests.h"

// The way of a run for which a home referred this node to other nodes.
//
//   home: "A, B and C should have its first 5 pages"
//     -> A has 5: done                       (one request more than without a referral)
//     -> A has 2, B has 5: done, and the shortfall of A is reported to the home
//     -> A, B and C have fewer: a request to the home reports that, and returns its own pages
//
// So a run takes at most kReferralNodesMax + 1 requests more than it would without referrals. A
// holder returns only its own pages and refers to no other node.
namespace crumb::server {

// The requests for one run that follow from one referral.
struct ReferralTrail {
  size_t run = 0;                  // index into the operation's runs
  std::shared_ptr<Peer> home;      // the home that referred; null: this node is the home
  size_t pages = 0;                // leading pages that the nodes should have
  std::vector<std::string> nodes;  // nodes that no request was sent to yet, the best first
  // Nodes that returned fewer pages, and how many they have.
  std::vector<std::pair<std::string, size_t>> lacking;
};

// One call that follows referrals.
struct TrailRequest {
  enum class To : uint8_t {
    kHolder,  // a node that a home referred to
    kHome,    // the home again, with the shortfalls of the holders
  };
  To to = To::kHolder;
  std::shared_ptr<Peer> peer;
  std::vector<ReferralTrail> trails;  // one for each of the call's runs
};

// Returns the referrals of a home's response to `home`. Referrals for runs or pages that were not
// requested are left out.
std::vector<ReferralTrail> TrailsOf(const HomeRequest& home,
                                    const v1::PeerAcquireResponse& response,
                                    const std::vector<size_t>& run_pages);

// Returns the next request for each trail, those to one node as one, and appends trails that have
// come to their end to `ended`. Nodes that are not there or whose breaker is open are skipped.
std::vector<TrailRequest> NextRequests(const PullContext& context,
                                       std::vector<ReferralTrail> trails,
                                       std::vector<ReferralTrail>* ended);

// Adds the shortfalls of holders to a request to the home; `run` is the index into its runs.
void AddShortfalls(const ReferralTrail& trail, size_t run, v1::PeerAcquireRequest* message);

// Reports to the home, without waiting for it, which holders lack pages. `keys` are the run's, as
// bytes.
void ReportShortfalls(const PullContext& context, const PullRequest& request,
                      const ReferralTrail& trail, const std::string& keys);

}  // namespace crumb::server
