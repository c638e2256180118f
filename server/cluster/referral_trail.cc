// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/referral_trail.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace crumb::server {

std::vector<ReferralTrail> TrailsOf(const HomeRequest& home,
                                    const v1::PeerAcquireResponse& response,
                                    const std::vector<size_t>& run_pages) {
  std::vector<ReferralTrail> trails;
  std::set<size_t> runs;
  for (const v1::PeerReferral& referral : response.referrals()) {
    if (referral.run() >= home.runs.size()) continue;
    const size_t run = home.runs[referral.run()];
    if (response.hit_pages(static_cast<int>(referral.run())) > 0) continue;
    if (referral.pages() == 0 || referral.pages() > run_pages[referral.run()]) continue;
    if (!runs.insert(run).second) continue;
    ReferralTrail trail;
    trail.run = run;
    trail.home = home.peer;
    trail.pages = referral.pages();
    const auto nodes =
        std::min(referral.nodes_size(), static_cast<int>(HolderDirectory::kReferralNodesMax));
    trail.nodes.assign(referral.nodes().begin(), referral.nodes().begin() + nodes);
    trails.push_back(std::move(trail));
  }
  return trails;
}

namespace {

// Returns the next node that the trail leads to; null: the trail has come to its end.
std::shared_ptr<Peer> TakeNext(const PullContext& context, ReferralTrail& trail) {
  while (!trail.nodes.empty()) {
    std::shared_ptr<Peer> peer = context.peers.Find(trail.nodes.front());
    trail.nodes.erase(trail.nodes.begin());
    if (peer == nullptr || peer == trail.home) continue;
    if (peer->breaker().Allow()) return peer;
    context.metrics.breaker_skips.Add();
  }
  return nullptr;
}

}  // namespace

std::vector<TrailRequest> NextRequests(const PullContext& context,
                                       std::vector<ReferralTrail> trails,
                                       std::vector<ReferralTrail>* ended) {
  std::vector<TrailRequest> requests;
  for (ReferralTrail& trail : trails) {
    TrailRequest::To to = TrailRequest::To::kHolder;
    std::shared_ptr<Peer> peer = TakeNext(context, trail);
    if (peer == nullptr) {
      if (trail.home == nullptr || !trail.home->breaker().Allow()) {
        ended->push_back(std::move(trail));
        continue;
      }
      peer = trail.home;
      to = TrailRequest::To::kHome;
    }
    auto found = std::find_if(requests.begin(), requests.end(), [&](const TrailRequest& each) {
      return each.peer == peer && each.to == to;
    });
    if (found == requests.end()) {
      found = requests.insert(requests.end(), {to, std::move(peer), {}});
    }
    found->trails.push_back(std::move(trail));
  }
  return requests;
}

void AddShortfalls(const ReferralTrail& trail, size_t run, v1::PeerAcquireRequest* message) {
  for (const auto& [node, pages] : trail.lacking) {
    v1::PeerShortfall* const shortfall = message->add_not_at();
    shortfall->set_run(static_cast<uint32_t>(run));
    shortfall->set_node(node);
    shortfall->set_pages(static_cast<uint32_t>(pages));
  }
}

void ReportShortfalls(const PullContext& context, const PullRequest& request,
                      const ReferralTrail& trail, const std::string& keys) {
  if (trail.lacking.empty()) return;
  if (trail.home != nullptr) {
    v1::PeerAcquireRequest message = MakePeerAcquire(request, {keys});
    AddShortfalls(trail, 0, &message);
    trail.home->Acquire(std::move(message), request.deadline,
                        [](const absl::StatusOr<v1::PeerAcquireResponse>&) {});
    return;
  }
  std::vector<PageKey> pages(keys.size() / sizeof(PageKey));
  std::memcpy(pages.data(), keys.data(), keys.size());
  for (const auto& [node, has] : trail.lacking) {
    context.metrics.holders_forgotten.Add();
    context.holders->Forget(node, request.keyspace->id, std::span(pages).subspan(has));
  }
}

}  // namespace crumb::server
