// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/holder_directory.h"
#include "crumb/v1/peer_service.pb.h"
#include "server/cluster/cluster_metrics.h"
#include "server/cluster/cluster_options.h"
#include "server/cluster/peer_leases.h"
#include "server/cluster/peer_sessions.h"
#include "server/cluster/peer_table.h"
#include "server/cluster/remote_reader.h"
#include "server/keyspaces/keyspace_registry.h"
#include "transport/fragment_source.h"

// The work of PeerService's calls, without gRPC. Nothing here blocks; `done` is called exactly
// once, and messages stay valid until then.
namespace crumb::server {

// The parts of this node that the calls of other nodes work with; all outlive the calls.
struct PeerCallContext {
  const Clock& clock;
  storage::TieredStore& store;
  KeyspaceRegistry& keyspaces;
  PeerTable& peers;
  PeerSessions& sessions;
  PeerLeases& leases;
  RemoteReader& reader;
  // Pages that this node fetches for offers, counted for the node that offered them.
  PartyBudget& push_pages;
  HolderDirectory& holders;
  ClusterMetrics& metrics;
  PushPolicy push_policy;
  Duration push_deadline;
  size_t keys_max;
  size_t record_page_bytes;  // limit of the records in one PeerKeyspaces response
  std::function<v1::NodeRecord()> self;
  // Takes over another node's records of keyspaces, on a thread that may block, then calls back
  // with an error if some of it is not in force.
  std::function<void(std::vector<v1::KeyspaceEntry>, std::function<void(absl::Status)>)> merge;
  std::function<absl::Status()> drain;
};

using PeerDone = std::function<void(absl::Status)>;

// Leases in one PeerRelease at most; callers release one at a time.
inline constexpr int kReleasesMax = 1024;

// kFailedPrecondition: a caller with this node's id, or of a wire version that this node does not
// support. kInvalidArgument: no node's name.
absl::Status CheckCaller(const PeerCallContext& context, const v1::PeerCaller& caller);

// Returns this node's record and the number of its latest change of a keyspace record. Needs no
// caller, because a node that is not known yet calls it first.
void PeerHello(const PeerCallContext& context, v1::PeerHelloResponse* response);
// Leases or finds the pages of several runs for another node and gives it a session to read them
// with. As a home it refers the node to holders instead, if that is requested. Misses are in the
// response; a page is not leased if a bound of the node's leases is reached.
void PeerAcquire(const PeerCallContext& context, const v1::PeerAcquireRequest& request,
                 TimePoint deadline, v1::PeerAcquireResponse* response, PeerDone done);
// Ends leases of the calling node; others' and unknown ones are ignored.
absl::Status PeerRelease(const PeerCallContext& context, const v1::PeerReleaseRequest& request);
// Takes an offer of pages: notes the node as their holder and fetches those that the push policy
// wants. The response names the pages that were not taken, with reasons.
void PeerPush(const PeerCallContext& context, const v1::PeerPushRequest& request,
              TimePoint deadline, v1::PeerPushResponse* response, PeerDone done);
// Takes over the caller's records and returns a page of this node's. The response says whether a
// record was refused.
void PeerKeyspaces(const PeerCallContext& context, const v1::PeerKeyspacesRequest& request,
                   v1::PeerKeyspacesResponse* response, PeerDone done);
// Returns the request of a PeerRead to the page source. kNotFound: the keyspace is not known;
// kInvalidArgument: session, keys or range.
absl::StatusOr<transport::SourceRequest> SourceRequestOf(const PeerCallContext& context,
                                                         const v1::PeerReadRequest& request,
                                                         TimePoint deadline);

// The functions below decode and check fields that requests of other nodes have in common.

// Decodes page keys. kInvalidArgument: there is none, there are more than `keys_max`, or the last
// one is not whole.
absl::StatusOr<std::vector<PageKey>> KeysOf(const std::string& bytes, size_t keys_max);

// Returns the range. kInvalidArgument: it is empty or out of the keyspace's bounds.
absl::StatusOr<TileRange> RangeOf(const Keyspace& keyspace, const v1::TileRange& range);

// Returns the budget that a call counts against: its node's, or the empty name for all nodes
// together that are not in the view, because those might have any name.
std::string BudgetOf(const PeerCallContext& context, const v1::PeerCaller& caller);

}  // namespace crumb::server
