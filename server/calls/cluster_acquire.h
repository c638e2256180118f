// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "server/calls/call_context.h"
#include "server/cluster/remote_reader.h"

namespace crumb::server {

// A prefix to lease or to look for, and where it lies in its sequence.
struct ClusterAcquireRequest {
  std::shared_ptr<Keyspace> keyspace;
  storage::AcquireRequest wanted;
  uint32_t first_page = 0;  // position of the first key
  PageKey run;              // begins the run of the first key; zeros: it does itself, or not known
  bool everyone = false;    // requests go to every node, not only to homes
  // A caller waits: no longer than the cluster's lookup deadline. Else as long as wanted.deadline.
  bool awaited = true;
};

// Leases the leading pages that this node has. If there is a cluster and time is left, it pulls the
// following pages from other nodes into host memory; they have the tier kRemote. Otherwise the same
// as TieredStore::Acquire. `done` is called once, possibly before this returns or on a thread of
// the store or of the cluster; the caller ends the lease. A page that no node delivers in time is a
// miss, not an error.
void AcquireAnywhere(const CallContext& context, ClusterAcquireRequest request,
                     std::function<void(absl::StatusOr<storage::AcquireResult>)> done);

// Finds where the pages of a prefix are, on this node and, with the requests of AcquireAnywhere, on
// others. Leases and moves nothing.
void FindAnywhere(const CallContext& context, const ClusterAcquireRequest& request,
                  std::function<void(FoundPages)> done);

// Whether another node could have the first page that this one lacks.
bool MayBeElsewhere(MissReason reason);

}  // namespace crumb::server
