// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/statistics.h"

// Workload `quality`: what quantized history does to a model's predictions. Every method reads the
// same token sequences in steps of 64 tokens that are aligned with eviction, so each token sees
// what it would see in decode: sink 64 and recent 256 to 319 in BF16, the rest as the method
// stores it. Exact keys and values of the same sequence are the reference. docs/quality.md has the
// protocol.
//
//   bf16           16 bits: BF16 pages through the same path
//   naive          no rotation, no clip
//   hadamard       Hadamard rotation, clip
//   oscar          rotation per layer from calibration text, clip .96 / .92; also the row
//                  `oscar-best-clip`, its clips chosen on calibration text
//   crumb          rotation per KV head, means by position, feedback, rescale, mass shift
//   crumb-context  crumb, calibrated on sequences as long as the largest context
//   kivi, turboquant3, turboquant3-mse, int4-hadamard: for comparison, bench/quality_methods/
//
// naive to crumb run through a client::Worker: real pages, the real attention. The others store
// their own bytes and are attended as the BF16 rows that come back from them.
namespace crumb::bench {

struct QualityOptions {
  std::string model;                           // HF directory, Qwen3 architecture
  std::vector<std::string> texts;              // evaluated
  std::vector<std::string> calibration_texts;  // for oscar and crumb; other texts
  std::vector<std::string> methods = {"bf16",        "naive",         "hadamard", "kivi",
                                      "turboquant3", "int4-hadamard", "oscar",    "crumb"};
  std::vector<std::string> rotations;  // rotation files to compare as well
  std::vector<int> contexts;           // empty: 1,024, 2,048 and the model's maximum
  int sequences = 16;                  // of each context, at most
  int passkeys = 1000;                 // asked for at the largest context; 0: none
  bool passkeys_together = false;      // up to 16 in a document, rather than one
  int prefill_block = 8192;            // of the prefill column
  int calibration_context = 1024;
  int calibration_tokens = 32768;  // at most
  int clip_sequences = 4;          // calibration sequences that choose oscar's clips; 0: do not
  int threads = 0;                 // sequences computed at a time; 0: one per CPU
  std::string device = "cpu";      // or cuda: INT2 attention on the GPU
  std::string plot;                // SVG file to write, or empty
  bool quiet = false;              // no progress
};

// Recall of the keys whose depth, or distance, is in [from, to).
struct RecallBin {
  double from = 0.0;
  double to = 0.0;
  int count = 0;
  Estimate recall;
};

struct PasskeyScore {
  Estimate recall;      // of free greedy generation; error over documents
  Interval below_bf16;  // bf16's recall less this one, paired, 95 % over documents
  Estimate answer_nll;  // mean negative log-likelihood of an answer's token, nats
  std::vector<RecallBin> by_depth;
  std::vector<RecallBin> by_distance;
};

// Means over sequences, each with its standard error.
struct QualityRow {
  std::string method;
  int context = 0;
  double bits = 0.0;               // stored per element of a history page
  double bits_with_windows = 0.0;  // per element of a sequence of this context, windows in BF16
  float clip_k = 0.0f;             // of the INT2 methods; 0: none
  float clip_v = 0.0f;
  Estimate kl;          // nats, against exact keys and values
  Estimate kl_prefill;  // the same with prefill semantics
  Estimate perplexity;
  Estimate top1;           // share of positions with the same most likely token
  Interval kl_over_oscar;  // paired, 95 % over sequences; value 0 without oscar
  Interval kl_over_best_oscar;
  Interval kl_over_long_calibration;  // crumb over crumb-context
  bool has_passkeys = false;
  PasskeyScore passkey;
};

struct QualityResult {
  int sequences = 0;  // of the smallest number over contexts
  int passkeys = 0;
  int passkey_documents = 0;
  bool passkeys_together = false;
  int prefill_block = 0;
  int64_t shared_bytes = 0;  // evaluated bytes that stand in calibration texts too
  std::string device;
  bool interrupted = false;              // figures are of what was done until then
  std::vector<double> exact_perplexity;  // by context
  std::vector<int> contexts;
  std::vector<QualityRow> rows;  // by context, then in the order of the methods
};

// kInvalidArgument: texts too short for two sequences, calibration text that is evaluated, a method
// that is not known or needs calibration text and has none, a context beyond the model's or too
// short for passkeys; all before anything is measured.
// kFailedPrecondition: device cuda without one. kCancelled: interrupted before there was a figure.
// Errors of the model and of calibration.
absl::StatusOr<QualityResult> RunQualityWorkload(const QualityOptions& options);

}  // namespace crumb::bench
