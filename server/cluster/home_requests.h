// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/cluster/remote_reader.h"

// The common part of requests for pages of other nodes (pull_operation.h, remote_reader.cc): the
// runs that they touch, the nodes that they are sent to, and the message that is sent.
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

// One request to a home: the node, and the runs that are requested of it.
struct HomeRequest {
  std::shared_ptr<Peer> peer;
  std::vector<size_t> runs;  // indices into the operation's runs
};

// Returns one request for each home of `runs`, in either view, or for every node of the cluster if
// `everyone` is set. Nodes whose breaker is open are left out.
std::vector<HomeRequest> HomeRequestsFor(const PullContext& context,
                                         const std::vector<PageKey>& runs, bool everyone);

// Returns the referral for `pages` of the request that this node, as a home of the run, would give
// to another node. `counted`: the pages are to be read there. None: this node is not a home of the
// run, or its directory has no holder.
std::optional<HolderDirectory::Referral> OwnReferral(const PullContext& context,
                                                     const PullRequest& request, const PageKey& run,
                                                     const std::vector<size_t>& pages,
                                                     bool counted);

// Returns the message that requests the keys of `runs`, each 32-byte keys one after the other.
v1::PeerAcquireRequest MakePeerAcquire(const PullRequest& request, std::vector<std::string> runs);

// Returns whether the response has the sizes that the request implies. A response that does not is
// treated as a failed call.
bool Fits(const v1::PeerAcquireRequest& request, const v1::PeerAcquireResponse& response);

// The bytes of keys[i] for i in `pages`.
std::string KeyBytes(const std::vector<PageKey>& keys, const std::vector<size_t>& pages);

// Returns the reason; values that a home does not send for a page that it lacks are kAbsent.
MissReason ReasonFromProto(v1::MissReason reason);

}  // namespace crumb::server
