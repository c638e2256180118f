// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/cpu_isa.h"
#include "kernels/tile.h"

// Workload `codec`: what the CPU kernels reach on one core, per instruction set, against the read
// bandwidth measured in the same run.
//
//   read        sum over a buffer larger than the last cache: the limit
//   quantize    BF16 window -> INT2 tile, rotated; bytes are those of the BF16 window
//   dequantize  INT2 tile -> f32 rows, not rotated; bytes are those of the BF16 window
//   attention   one query token over history pages only, all KV heads, in one format
//
// Attention walks as many layers as make each format's pages larger than the last cache, one after
// the other as a decode step does, so every page comes from memory. INT2 and BF16 are timed in
// turn. Times are CPU time of the thread, so that other work on the machine disturbs them little.
namespace crumb::bench {

struct CodecOptions {
  kernels::TileShape shape;
  int kv_heads = 8;
  std::vector<int> contexts = {1024, 4096, 32768};
  std::vector<int> heads_per_kv_head = {1, 4, 8};
  std::vector<kernels::CpuIsa> isas;    // empty: all that the machine has
  size_t footprint_bytes = 192u << 20;  // least bytes a pass over memory touches
  int rounds = 5;                       // the median of so many is reported
};

struct CodecRow {
  std::string isa;
  std::string operation;        // read, quantize, dequantize, attention
  std::string format;           // bf16 or int2, of the pages attended; empty for others
  int context = 0;              // tokens attended, 0 for others
  int heads_per_kv_head = 0;    // query heads per KV head, 0 for others
  double microseconds = 0.0;    // one layer, or one tile; 0 for read
  double gb_per_s = 0.0;        // 1e9 bytes per second of what the operation reads
  double read_fraction = 0.0;   // gb_per_s / that of `read`
  double time_over_bf16 = 0.0;  // INT2 attention: its time / that of BF16 in the same rounds
};

// Runs on the calling thread. Leaves the active instruction set as it was.
std::vector<CodecRow> RunCodecWorkload(const CodecOptions& options);

}  // namespace crumb::bench
