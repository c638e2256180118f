// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/cluster/remote_reader.h"

// The common part of requests for pages of other nodes: the runs that they touch, the nodes that
// they ask, and the call that asks. server/cluster/pull_operation.h, find_operation.h.
namespace crumb::server {

// The runs of a request's pages: where each begins among the keys, and the page it is named by.
struct RunSpan {
  PageKey key;
  size_t begin = 0;
  size_t end = 0;
};
std::vector<RunSpan> RunsOf(const PullRequest& request);

// The tier of each page that this node has. Behind the first one that it lacks there may be some:
// as their home.
std::vector<std::optional<Tier>> TiersHere(storage::TieredStore& store, const PullRequest& request);

// One node, and the runs that it is asked for.
struct HomeQuestion {
  std::shared_ptr<Peer> peer;
  std::vector<size_t> runs;  // indices
};

// One question for each home of `runs`, in either view, or for every node; but for nodes whose
// breaker is open.
std::vector<HomeQuestion> QuestionsFor(const PullContext& context, const std::vector<PageKey>& runs,
                                       bool everyone);

// Returns whom this node, as a home of the run, would refer itself to for `pages` of the request.
// `counted`: they are to be read there. None: it is not the home, or knows no holder.
std::optional<HolderDirectory::Referral> OwnReferral(const PullContext& context,
                                                     const PullRequest& request, const PageKey& run,
                                                     const std::vector<size_t>& pages,
                                                     bool counted);

// The call that asks for the keys of `runs`, each 32-byte keys one after the other.
v1::PeerAcquireRequest MakePeerAcquire(const PullRequest& request, std::vector<std::string> runs);

// Whether the answer can be one to the question; else it is treated as none at all.
bool Fits(const v1::PeerAcquireRequest& question, const v1::PeerAcquireResponse& answer);

// The bytes of keys[i] for i in `pages`.
std::string KeyBytes(const std::vector<PageKey>& keys, const std::vector<size_t>& pages);

MissReason ReasonFromProto(v1::MissReason reason);

}  // namespace crumb::server
