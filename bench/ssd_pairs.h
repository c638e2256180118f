// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"
#include "bench/store_result.h"
#include "bench/store_workload.h"

namespace crumb::bench {

// The `ssd` plane of the store workload, for each fragment size: fills a crumbd whose host memory
// holds a fraction of the set, waits until everything is durable, then reads files and pages in
// turn. Adds rows and the ratio to `result`.
absl::Status RunSsdPairs(const StoreWorkloadOptions& options, StoreResult& result);

}  // namespace crumb::bench
