// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

// Times evicting windows, K and V both rotated, head_dim 128, G = 128, 8 KV heads; and verifying
// tiles.
namespace crumb::bench {

struct EvictWorkload {
  std::string method;
  int layers = 1;
  int tokens = 64;  // of each layer
  double target_us = 0.0;
  bool sums = false;  // CRC-32C of every tile too
};

struct EvictResult {
  double us = 0.0;     // the launch
  double bytes = 0.0;  // rows read, tiles written
  // Of a sample of tiles, against the CPU's of the same rows. codes_differ: share of the codes.
  // rel_error: how much the sum of |(y - z)(I + U)|^2 over all rows differs, as a share of the
  // CPU's; y a row in the quantized basis, z what the tile holds, U the feedback of crumb, else 0.
  double codes_differ = 0.0;
  double rel_error = 0.0;
};

EvictResult RunEvict(const EvictWorkload& workload);

std::vector<EvictWorkload> StandardEvictWorkloads();

// Times the check of page tiles against their sums: one layer, 8 KV heads, pages at random places.
// One byte of one page is wrong.
struct VerifyWorkload {
  int pages = 0;
};

struct VerifyResult {
  double us = 0.0;
  double bytes = 0.0;
  int reported = 0;  // pages found damaged
};

VerifyResult RunVerify(const VerifyWorkload& workload);

std::vector<VerifyWorkload> StandardVerifyWorkloads();

}  // namespace crumb::bench
