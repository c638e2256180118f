// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/referral_trail.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace crumb::server {

std::vector<ReferralTrail> TrailsOf(const HomeQuestion& question,
                                    const v1::PeerAcquireResponse& answer,
                                    const std::vector<size_t>& run_pages) {
  std::vector<ReferralTrail> trails;
  std::set<size_t> runs;
  for (const v1::PeerReferral& referral : answer.referrals()) {
    if (referral.run() >= question.runs.size()) continue;
    const size_t run = question.runs[referral.run()];
    if (answer.hit_pages(static_cast<int>(referral.run())) > 0) continue;
    if (referral.pages() == 0 || referral.pages() > run_pages[referral.run()]) continue;
    if (!runs.insert(run).second) continue;
    ReferralTrail trail;
    trail.run = run;
    trail.home = question.peer;
    trail.pages = referral.pages();
    const auto nodes =
        std::min(referral.nodes_size(), static_cast<int>(HolderDirectory::kReferralNodesMax));
    trail.nodes.assign(referral.nodes().begin(), referral.nodes().begin() + nodes);
    trails.push_back(std::move(trail));
  }
  return trails;
}

namespace {

// Returns the next node to ask; null: the trail has come to its end.
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

std::vector<TrailQuestion> NextQuestions(const PullContext& context,
                                         std::vector<ReferralTrail> trails,
                                         std::vector<ReferralTrail>* ended) {
  std::vector<TrailQuestion> questions;
  for (ReferralTrail& trail : trails) {
    TrailQuestion::To to = TrailQuestion::To::kHolder;
    std::shared_ptr<Peer> peer = TakeNext(context, trail);
    if (peer == nullptr) {
      if (trail.home == nullptr || !trail.home->breaker().Allow()) {
        ended->push_back(std::move(trail));
        continue;
      }
      peer = trail.home;
      to = TrailQuestion::To::kHome;
    }
    auto question =
        std::find_if(questions.begin(), questions.end(),
                     [&](const TrailQuestion& each) { return each.peer == peer && each.to == to; });
    if (question == questions.end()) {
      question = questions.insert(questions.end(), {to, std::move(peer), {}});
    }
    question->trails.push_back(std::move(trail));
  }
  return questions;
}

void AddShortfalls(const ReferralTrail& trail, size_t run, v1::PeerAcquireRequest& question) {
  for (const auto& [node, pages] : trail.lacking) {
    v1::PeerShortfall* const shortfall = question.add_not_at();
    shortfall->set_run(static_cast<uint32_t>(run));
    shortfall->set_node(node);
    shortfall->set_pages(static_cast<uint32_t>(pages));
  }
}

void ReportShortfalls(const PullContext& context, const PullRequest& request,
                      const ReferralTrail& trail, const std::string& keys) {
  if (trail.lacking.empty()) return;
  if (trail.home != nullptr) {
    v1::PeerAcquireRequest question = MakePeerAcquire(request, {keys});
    AddShortfalls(trail, 0, question);
    trail.home->Acquire(std::move(question), request.deadline,
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
