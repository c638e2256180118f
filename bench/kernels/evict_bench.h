// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

// Times eviction of windows with K and V rotated, head_dim 128, G = 128 and 8 KV heads, and
// verification of tiles.
namespace crumb::bench {

struct EvictWorkload {
  std::string method;  // a method, or crumb-metric: crumb whose feedback has weights
  int layers = 1;
  int tokens = 64;  // tokens of each layer
  double target_us = 0.0;
  bool sums = false;  // also computes the CRC-32C of every tile
};

struct EvictResult {
  double us = 0.0;     // time of the launch
  double bytes = 0.0;  // rows read, tiles written
  // A sample of tiles is compared with the CPU's tiles of the same rows. codes_differ is the
  // fraction of codes that differ. rel_error is the relative difference of the sum over all rows of
  // |(y - z)(I + U)|^2, where y is a row in the quantized basis, z the row of the tile, and U the
  // feedback of crumb (0 for other methods).
  double codes_differ = 0.0;
  double rel_error = 0.0;
};

// Times one workload on the current device and checks a sample of its tiles.
EvictResult RunEvict(const EvictWorkload& workload);

// Returns the workloads that crumb-kernel-bench runs, in order.
std::vector<EvictWorkload> StandardEvictWorkloads();

// Times the verification of page tiles: one layer, 8 KV heads, pages at random addresses. One byte
// of one page is wrong.
struct VerifyWorkload {
  int pages = 0;
};

struct VerifyResult {
  double us = 0.0;
  double bytes = 0.0;
  int reported = 0;  // pages reported as damaged
};

VerifyResult RunVerify(const VerifyWorkload& workload);

std::vector<VerifyWorkload> StandardVerifyWorkloads();

}  // namespace crumb::bench
