// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "bench/block_trace.h"
#include "storage/policy/policy.h"

namespace crumb::bench {

// `belady`: the optimum, which knows the trace. The block whose next use is farthest goes first,
// the deeper one of a chain when they tie; blocks without a next use go before all others. The
// accesses must be the trace's requests in order, fingerprints its block ids. `trace` must outlive
// the policy.
std::unique_ptr<storage::EvictionPolicy> MakeBeladyPolicy(const BlockTrace& trace);

}  // namespace crumb::bench
