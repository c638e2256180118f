// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

// The rates of the device's memory, and the timing of work on the device.
namespace crumb::bench {

// Ends the program with a message if a CUDA call failed.
void Check(cudaError_t error, const char* what);

// Returns the median time, in microseconds, of `repeats` replays of a graph with the work that
// `enqueue` enqueues on the stream. Two replays before are not timed.
double TimeGraph(const std::function<void(cudaStream_t)>& enqueue, int repeats = 5);

// Return the terabytes per second of reading `bytes` at `data`, and of copying its first half to
// the second (read and written bytes are counted).
double ReadRate(const void* data, size_t bytes);
double CopyRate(void* data, size_t bytes);

}  // namespace crumb::bench
