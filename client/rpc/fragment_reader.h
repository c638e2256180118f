// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "client/rpc/connection.h"
#include "crumb/acquire.h"
#include "crumb/v1/cache_service.pb.h"

namespace crumb::client {

struct ReadFragments {
  std::vector<LeasedFragment> fragments;
  std::vector<DeviceFragment> device_fragments;
  std::shared_ptr<const void> device_store;    // what the latter point to
  int hit_pages = 0;                           // pages whose fragments all passed
  MissReason miss_reason = MissReason::kNone;  // of the first one that did not
};

// Reads and checks the headers of what an Acquire answered, and takes the part about devices out of
// `answer`: place, magic, sums of the header,
// keyspace, generation, key, ranges, and that the wanted tiles are all there. Pages for which
// `verify` is true have their tiles read and checked too, if they are in host memory.
ReadFragments ReadAcquireResponse(const Connection& connection, const AcquireRequest& request,
                                  v1::AcquireResponse& answer,
                                  const std::function<bool(int page)>& verify);

// Why a fragment with this header may not stand for `key`. kNone: it may.
MissReason CheckIdentity(const FragmentHeader& header, const KeyspaceId& keyspace,
                         const PageKey& key);

}  // namespace crumb::client
