// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace crumb::bench {

// Enqueues one kernel that reads the experts whose indices are named, as fast as memory allows, and
// computes nothing with them.
//   experts  device, expert i at i * bytes; bytes is a multiple of 16
//   ids      device [count]
//   unused   device [1]
cudaError_t ReadExperts(const uint8_t* experts, int64_t bytes, const int32_t* ids, int count,
                        uint32_t* unused, cudaStream_t stream);

}  // namespace crumb::bench
