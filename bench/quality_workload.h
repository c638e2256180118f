// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

// Workload `quality`: what quantized history does to a model's predictions. Every method reads the
// same token sequences through a worker's real pages and attention, in steps of 64 tokens, so that
// each token sees what it would see in decode: sink 64 and recent 256 to 319 in BF16, the rest
// INT2. Exact keys and values of the same sequence are the reference.
//
//   bf16      16 bits: BF16 pages through the same path
//   naive     no rotation, no clip
//   hadamard  Hadamard rotation, clip
//   oscar     rotation per layer from calibration text, clip
//   crumb     rotation per KV head, means by position, feedback, rescale, mass shift
//
// Rotation files are compared as they are, whatever they were made with.
namespace crumb::bench {

struct QualityOptions {
  std::string model;                           // HF directory, Qwen3 architecture
  std::vector<std::string> texts;              // evaluated
  std::vector<std::string> calibration_texts;  // for oscar and crumb
  std::vector<std::string> methods = {"bf16", "naive", "hadamard", "oscar", "crumb"};
  std::vector<std::string> rotations;  // rotation files to compare as well
  int context = 4096;
  int sequences = 16;  // at most
  int calibration_context = 1024;
  int calibration_tokens = 32768;  // at most
  int threads = 0;                 // 0: one per CPU
};

// Means over sequences, each with its standard error.
struct QualityRow {
  std::string method;
  double bits = 0.0;  // stored per element of a history page
  double kl = 0.0;    // nats, against exact keys and values
  double kl_error = 0.0;
  double perplexity = 0.0;
  double perplexity_error = 0.0;
  double top1 = 0.0;  // share of positions with the same most likely token
  double top1_error = 0.0;
  // KL over oscar's, 95 % interval by a paired bootstrap over sequences; 0 without oscar.
  double kl_over_oscar = 0.0;
  double kl_over_oscar_low = 0.0;
  double kl_over_oscar_high = 0.0;
};

struct QualityResult {
  int sequences = 0;
  int context = 0;
  double exact_perplexity = 0.0;
  std::vector<QualityRow> rows;
};

// kInvalidArgument: texts too short for two sequences, or a method that needs calibration text and
// has none. Errors of the model and of calibration.
absl::StatusOr<QualityResult> RunQualityWorkload(const QualityOptions& options);

nlohmann::json QualityJson(const QualityResult& result);
std::string QualityText(const QualityResult& result);

}  // namespace crumb::bench
