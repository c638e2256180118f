// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "bench/gpu_run.h"
#include "bench/model_shape.h"

// The measurements of decode steps, as text and as JSON. They need no CUDA.
namespace crumb::bench {

// The circumstances of a measurement: device, rates of its memory (TB/s, 1e12 bytes per second),
// tokens of each sequence, and the memory for which the largest batch is chosen.
struct DecodeRun {
  GpuRun gpu;
  int cublas = 0;  // its version
  double read_tbps = 0;
  double copy_tbps = 0;
  int context = 0;
  double memory_gb = 0;

  int64_t memory_bytes() const { return static_cast<int64_t>(memory_gb * 1e9); }
};

// The figures of one format and batch size. Times are medians in microseconds.
struct DecodeRow {
  static constexpr int kEvictPeriod = 64;  // steps between two evictions of a sequence

  KvFormat kv = KvFormat::kInt2;
  int batch = 0;
  double step_us = 0;
  double attention_us = 0;    // attention of a step by itself
  double projections_us = 0;  // projections of a step by itself
  double evict_us = 0;        // additional time of a step that evicts a window of every sequence
  bool sane = false;          // the logits are finite and differ

  // Returns the mean time of a step, with its part of the evictions.
  double MeanStepUs() const { return step_us + evict_us / kEvictPeriod; }
  double TokensPerSecond() const { return 1e6 * batch / MeanStepUs(); }
};

// The rows of one model.
struct DecodeRows {
  ModelShape model;
  std::vector<DecodeRow> rows;
};

// The gains of INT2 over BF16, and those that follow from the bytes of a step. 0 if not measured.
struct DecodeGains {
  int largest_bf16 = 0;  // batch that fits into memory_gb
  int largest_int2 = 0;
  double batch_1 = 0;  // time of BF16 over that of INT2
  double batch_1_of_bytes = 0;
  double per_gpu = 0;  // the same in tokens per second, for the largest batches
  double per_gpu_of_bytes = 0;
};
DecodeGains GainsOf(const DecodeRun& run, const DecodeRows& rows);

// Each text ends with a line end.
std::string RunText(const DecodeRun& run);
std::string ShapeText(const DecodeRun& run, const ModelShape& model);
std::string RowText(const DecodeRun& run, const ModelShape& model, const DecodeRow& row);
std::string GainsText(const DecodeRun& run, const DecodeRows& rows);

std::string DecodeJson(const DecodeRun& run, const std::vector<DecodeRows>& shapes);

}  // namespace crumb::bench
