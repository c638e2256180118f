// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/cluster/home_questions.h"

// The way of a run for which a home referred this node to other nodes.
//
//   home: "A, B and C should have its first 5 pages"
//     -> A has 5: done                       (one question more than without a referral)
//     -> A has 2, B has 5: done, and the home is told that A has 2
//     -> A, B and C have fewer: the home is told so and asked what it has itself; done
//
// So a run takes at most kReferralNodesMax + 1 questions more than it would without referrals. A
// holder is asked for what it has itself and refers to no other.
namespace crumb::server {

// The questions about one run that follow from one referral.
struct ReferralTrail {
  size_t run = 0;                  // index into the operation's runs
  std::shared_ptr<Peer> home;      // that referred; null: this node is the home
  size_t pages = 0;                // leading pages that the nodes should have
  std::vector<std::string> nodes;  // that were not asked yet, the best first
  // Nodes that were asked and have fewer, and how many they have.
  std::vector<std::pair<std::string, size_t>> lacking;
};

// One call that follows referrals.
struct TrailQuestion {
  enum class To : uint8_t {
    kHolder,  // a node that a home referred to
    kHome,    // the home again, which is told what holders lack
  };
  To to = To::kHolder;
  std::shared_ptr<Peer> peer;
  std::vector<ReferralTrail> trails;  // one for each of the call's runs
};

// Returns the referrals of an answer to a question for `question.runs`. Referrals that a home
// cannot have meant are left out.
std::vector<ReferralTrail> TrailsOf(const HomeQuestion& question,
                                    const v1::PeerAcquireResponse& answer,
                                    const std::vector<size_t>& run_pages);

// Returns the next question for each trail, those to one node as one, and appends trails that have
// come to their end to `ended`. Nodes that are not there or whose breaker is open are skipped.
std::vector<TrailQuestion> NextQuestions(const PullContext& context,
                                         std::vector<ReferralTrail> trails,
                                         std::vector<ReferralTrail>* ended);

// Puts what holders lack into a question to the home; `run` is the index into its runs.
void AddShortfalls(const ReferralTrail& trail, size_t run, v1::PeerAcquireRequest& question);

// Reports to the home, without waiting for it, which holders lack pages. `keys` are the run's, as
// bytes.
void ReportShortfalls(const PullContext& context, const PullRequest& request,
                      const ReferralTrail& trail, const std::string& keys);

}  // namespace crumb::server
