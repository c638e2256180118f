// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "common/clock.h"

// The machine's limits without Crumb, measured in the same run as the workload whose figures are
// compared with them. GB are 1e9 bytes.
namespace crumb::bench {

// Measure one core that reads, or copies, a buffer of `bytes` repeatedly. For copies, the bytes of
// the source are counted.
double MemoryReadGbPerS(size_t bytes, Duration duration);
double MemoryCopyGbPerS(size_t bytes, Duration duration);

// Measures one thread that sends to another over TCP on the loopback address.
absl::StatusOr<double> LoopbackTcpGbPerS(Duration duration);

struct DirectReadOptions {
  std::string folder;      // its regular files, and those in folders below, are read
  size_t piece_bytes = 0;  // bytes of one read, a multiple of 4,096
  size_t bytes_max = 0;    // bytes after which it ends
  int depth = 8;           // reads in flight, one thread each
};

// Measures O_DIRECT reads of whole files in order. kNotFound: no file has a whole piece.
absl::StatusOr<double> DirectReadGbPerS(const DirectReadOptions& options);

}  // namespace crumb::bench
