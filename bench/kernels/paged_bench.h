// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

// Times the conversion of page tiles to an engine's BF16 paged KV (one launch, tiles and blocks at
// permuted addresses, outputs far larger than L2 except for the row of 4,096 tokens), and appending
// new rows (a graph of 20 calls), with head_dim 128, G = 128 and 8 KV heads.
namespace crumb::bench {

struct DequantizeWorkload {
  std::string name;
  int tokens = 65536;  // tokens of one layer
  int layers = 1;
  int block_tokens = 16;
  bool rotate_k = false;
  bool rotate_v = false;
  bool hnd = false;
  double target_percent = 0.0;  // target in percent of the copy rate; 0: none
};

struct AppendWorkload {
  int batch = 32;
  int q_tokens = 1;
  double target_us = 0.0;
};

struct PagedResult {
  double us = 0.0;
  double bytes = 0.0;  // bytes read and written
  bool warm = false;   // all bytes may be in L2
  // Dequantize: largest ||row - definition|| / ||definition|| of some rows, in double precision.
  double rel_error = 0.0;
};

// Time one workload on the current device; the first also checks some rows.
PagedResult RunDequantize(const DequantizeWorkload& workload);
PagedResult RunAppend(const AppendWorkload& workload);

std::vector<DequantizeWorkload> StandardDequantizeWorkloads();
std::vector<AppendWorkload> StandardAppendWorkloads();

}  // namespace crumb::bench
