// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/statusor.h"
#include "bench/quality_methods/paged_cache.h"

namespace crumb::bench {

// Opens attention by the CUDA decode kernel. A call copies its inputs to the device, runs the
// kernel on up to 8 query tokens at a time, and copies the result back. It shows the results of the
// kernel, not its speed. Thread-safe; calls run one after the other. kFailedPrecondition: the build
// has no CUDA, or there is no device.
absl::StatusOr<AttentionBackend> OpenDeviceAttention();

}  // namespace crumb::bench
