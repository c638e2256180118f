// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

// What the device's memory does, and how anything on it is timed.
namespace crumb::bench {

// Ends the program with a message when a CUDA call failed.
void Check(cudaError_t error, const char* what);

// Median over `repeats` replays of a graph that holds what `enqueue` puts on the stream; one
// replay in microseconds. Two replays run before, untimed.
double TimeGraph(const std::function<void(cudaStream_t)>& enqueue, int repeats = 5);

// Terabytes per second of reading `bytes` at `data`, and of copying its first half to the second
// (read and written bytes counted).
double ReadRate(const void* data, size_t bytes);
double CopyRate(void* data, size_t bytes);

}  // namespace crumb::bench
