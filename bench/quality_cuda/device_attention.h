// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/statusor.h"
#include "bench/quality_methods/paged_cache.h"

namespace crumb::bench {

// Attention by the CUDA decode kernel: copies what a call names to the device, runs the kernel on
// up to 8 query tokens at a time, and copies the result back. Slow and plain: it answers what the
// kernel computes, not how fast. Thread-safe, one call at a time. kFailedPrecondition: built
// without CUDA, or there is no device.
absl::StatusOr<AttentionBackend> OpenDeviceAttention();

}  // namespace crumb::bench
