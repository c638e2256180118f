// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

// Times evicting windows, K and V both rotated, head_dim 128, G = 128, 8 KV heads.
namespace crumb::bench {

struct EvictWorkload {
  std::string method;
  int layers = 1;
  int tokens = 64;  // of each layer
  double target_us = 0.0;
};

struct EvictResult {
  double us = 0.0;     // the launch
  double bytes = 0.0;  // rows read, tiles written
};

EvictResult RunEvict(const EvictWorkload& workload);

std::vector<EvictWorkload> StandardEvictWorkloads();

}  // namespace crumb::bench
