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

// The part of an Acquire's response that passed all checks. Fragments of a page that did not pass,
// and of the pages behind it, are left out.
struct ReadFragments {
  std::vector<LeasedFragment> fragments;
  std::vector<DeviceFragment> device_fragments;
  std::shared_ptr<const void> device_store;  // owns the memory that device_fragments refer to
  int hit_pages = 0;                         // leading pages whose fragments all passed the checks
  MissReason miss_reason = MissReason::kNone;  // why the page behind them did not pass
};

// Reads and checks the headers of the fragments in an Acquire's response: place, magic, checksum of
// the header, keyspace, generation, key, ranges, and whether all requested tiles are there. Moves
// the message about device fragments out of `response`. For pages for which `verify` returns true,
// the tiles in host memory are read and verified as well.
//
// crumbd's bytes are not trusted: lengths of lists, slab numbers, offsets, alignment and the
// headers in shared memory are checked before they are used. Headers cost microseconds per page;
// tiles that are verified are read once in full.
ReadFragments ReadAcquireResponse(const Connection& connection, const AcquireRequest& request,
                                  v1::AcquireResponse& response,
                                  const std::function<bool(int page)>& verify);

// Returns why a fragment with this header may not stand for `key`; kNone: it may.
MissReason CheckIdentity(const FragmentHeader& header, const KeyspaceId& keyspace,
                         const PageKey& key);

}  // namespace crumb::client
