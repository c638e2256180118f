// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/cpu_isa.h"
#include "kernels/tile.h"

// Workload `codec` measures the CPU kernels on one core, per instruction set, and compares them
// with the read bandwidth measured in the same run.
//
//   read        sum over a buffer larger than the last cache, which is the limit
//   quantize    BF16 window -> INT2 tile, rotated; bytes are those of the BF16 window
//   dequantize  INT2 tile -> f32 rows, not rotated; bytes are those of the BF16 window
//   attention   one query token over history pages only, all KV heads, in one format
//
// Attention runs over as many layers as make the pages of each format larger than the last cache,
// one after the other like a decode step, so that every page is read from memory. INT2 and BF16 are
// timed alternately. Times are CPU time of the thread, which other work on the machine affects
// little.
namespace crumb::bench {

struct CodecOptions {
  kernels::TileShape shape;
  int kv_heads = 8;
  std::vector<int> contexts = {1024, 4096, 32768};
  std::vector<int> heads_per_kv_head = {1, 4, 8};
  std::vector<kernels::CpuIsa> isas;    // empty: all of the machine
  size_t footprint_bytes = 192u << 20;  // least bytes of a pass over memory
  int rounds = 5;                       // the median of the rounds is reported
};

// The figure of one operation with one instruction set.
struct CodecRow {
  std::string isa;
  std::string operation;        // read, quantize, dequantize, attention
  std::string format;           // bf16 or int2 for attention, otherwise empty
  int context = 0;              // attended tokens, otherwise 0
  int heads_per_kv_head = 0;    // query heads per KV head for attention, otherwise 0
  double microseconds = 0.0;    // time of one layer or one tile; 0 for read
  double gb_per_s = 0.0;        // 1e9 bytes per second that the operation reads
  double read_fraction = 0.0;   // gb_per_s / that of `read`
  double time_over_bf16 = 0.0;  // INT2 attention: its time / that of BF16 in the same rounds
};

// Runs on the calling thread and restores the active instruction set.
std::vector<CodecRow> RunCodecWorkload(const CodecOptions& options);

}  // namespace crumb::bench
