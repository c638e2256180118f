// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "bench/decode/model_shape.h"
#include "bench/gpu_run.h"

// What was measured of decode steps, as text and as JSON. No CUDA.
namespace crumb::bench {

struct DecodeRun {
  GpuRun gpu;
  int cublas = 0;  // version
  double read_tbps = 0;
  double copy_tbps = 0;
  int context = 0;
  double memory_gb = 0;

  int64_t memory_bytes() const { return static_cast<int64_t>(memory_gb * 1e9); }
};

struct DecodeRow {
  static constexpr int kEvictPeriod = 64;  // steps from one window of a sequence to the next

  KvFormat kv = KvFormat::kInt2;
  int batch = 0;
  double step_us = 0;
  double attention_us = 0;    // of a step, alone
  double projections_us = 0;  // the same
  double evict_us = 0;        // what a step takes longer that evicts a window of every sequence
  bool sane = false;          // the logits are numbers

  double MeanStepUs() const { return step_us + evict_us / kEvictPeriod; }
  double TokensPerSecond() const { return 1e6 * batch / MeanStepUs(); }
};

struct DecodeRows {
  ModelShape model;
  std::vector<DecodeRow> rows;
};

// What INT2 gains over BF16, and what the bytes of a step allow; 0: not measured.
struct DecodeGains {
  int largest_bf16 = 0;  // batch that fits into the run's memory
  int largest_int2 = 0;
  double batch_1 = 0;  // BF16's time over INT2's
  double batch_1_of_bytes = 0;
  double per_gpu = 0;  // tokens per second, largest batches
  double per_gpu_of_bytes = 0;
};
DecodeGains GainsOf(const DecodeRun& run, const DecodeRows& rows);

// Each ends in a line end.
std::string RunText(const DecodeRun& run);
std::string ShapeText(const DecodeRun& run, const ModelShape& model);
std::string RowText(const DecodeRun& run, const ModelShape& model, const DecodeRow& row);
std::string GainsText(const DecodeRun& run, const DecodeRows& rows);

std::string DecodeJson(const DecodeRun& run, const std::vector<DecodeRows>& shapes);

}  // namespace crumb::bench
