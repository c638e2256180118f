// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "common/clock.h"

// What the machine does without Crumb in the way: the links that a workload's figures are compared
// with, measured in the same run. GB are 1e9 bytes.
namespace crumb::bench {

// One core reads (or copies: bytes of the source count) a buffer of `bytes` over and over.
double MemoryReadGbPerS(size_t bytes, Duration duration);
double MemoryCopyGbPerS(size_t bytes, Duration duration);

// One thread sends, another receives, over TCP on the loopback address.
absl::StatusOr<double> LoopbackTcpGbPerS(Duration duration);

struct DirectReadOptions {
  std::string folder;      // its regular files are read, and those in folders below
  size_t piece_bytes = 0;  // of one read, a multiple of 4,096
  size_t bytes_max = 0;    // ends after so many
  int depth = 8;           // reads in flight, one thread each
};

// O_DIRECT reads of whole files in order. kNotFound: no file holds a whole piece.
absl::StatusOr<double> DirectReadGbPerS(const DirectReadOptions& options);

}  // namespace crumb::bench
