// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/measure.h"

// Workload `quality` measures the effect of quantized history on a model's predictions. Every
// method reads the same token sequences in steps of 64 tokens that are aligned with eviction, so
// that each token attends the same segments as in decode: sink 64 and recent 256 to 319 in BF16,
// the rest as the method stores it. Exact keys and values of the same sequence are the reference.
// docs/quality/methods.md describes the protocol.
//
//   bf16           16 bits: BF16 pages through the same path
//   naive          no rotation, no clip
//   hadamard       Hadamard rotation, clip
//   oscar          rotation per layer from calibration text, clip .96 / .92; the row
//                  `oscar-best-clip` has clips that are chosen on calibration text
//   crumb          rotation per KV head, means by position, feedback, rescale, mass shift
//   crumb-context  crumb, calibrated on sequences as long as the largest context
//   kivi, turboquant3, turboquant3-mse, int4-hadamard, kvarn, block-gtq, optr: published methods
//                  (bench/quality_methods/); block-gtq and optr are calibrated on the same text
//   optr-mean      oscar with keys about their mean: optr with the rotations that it begins with
//
// The methods from naive to crumb run through a client::Worker, with real pages and attention. The
// others store their own bytes, and attention reads the BF16 rows that are decoded from them.
namespace crumb::bench {

struct QualityOptions {
  std::string model;                           // HF directory: Llama, Qwen2, Qwen3
  std::vector<std::string> texts;              // evaluated texts
  std::vector<std::string> calibration_texts;  // other texts, for calibration
  std::vector<std::string> methods = {"bf16",        "naive",         "hadamard", "kivi",
                                      "turboquant3", "int4-hadamard", "oscar",    "crumb"};
  std::vector<std::string> rotations;  // rotation files to compare as well
  std::vector<int> contexts;           // empty: 1,024, 2,048 and the model's maximum
  int sequences = 16;                  // maximum for each context
  int passkeys = 1000;                 // number at the largest context; 0: none
  bool passkeys_together = false;      // up to 16 per document instead of one
  int prefill_block = 8192;            // block size of the prefill column
  int calibration_context = 1024;
  int calibration_tokens = 32768;  // maximum over all calibration sequences
  int clip_sequences = 4;          // calibration sequences for oscar's best clip; 0: none
  int threads = 0;                 // sequences computed at a time; 0: one per CPU
  std::string device = "cpu";      // cpu, or cuda: INT2 attention on the GPU
  std::string plot;                // SVG file to write, or empty
  bool quiet = false;              // no progress
};

// The recall of keys whose depth, or distance, is in [from, to).
struct RecallBin {
  double from = 0.0;
  double to = 0.0;
  int count = 0;
  Estimate recall;
};

struct PasskeyScore {
  Estimate recall;      // recall of greedy generation; error over documents
  Interval below_bf16;  // bf16's recall minus this one, paired, 95 % over documents
  Estimate answer_nll;  // mean negative log-likelihood of an answer's token, nats
  std::vector<RecallBin> by_depth;
  std::vector<RecallBin> by_distance;
};

// Means over sequences, with standard errors.
struct QualityRow {
  std::string method;
  int context = 0;
  double bits = 0.0;               // stored bits per element of a history page
  double bits_with_windows = 0.0;  // bits per element of a whole sequence of this context
  float clip_k = 0.0f;             // clip of the INT2 methods; 0: none
  float clip_v = 0.0f;
  Estimate kl;          // nats, against exact keys and values
  Estimate kl_prefill;  // nats, with prefill semantics
  Estimate perplexity;
  Estimate top1;           // fraction of positions with the same most likely token
  Interval kl_over_oscar;  // paired, 95 % over sequences; value 0 without oscar
  Interval kl_over_best_oscar;
  Interval kl_over_long_calibration;  // crumb over crumb-context
  bool has_passkeys = false;
  PasskeyScore passkey;
};

struct QualityResult {
  int sequences = 0;  // the smallest number of any context
  int passkeys = 0;
  int passkey_documents = 0;
  bool passkeys_together = false;
  int prefill_block = 0;
  int64_t shared_bytes = 0;  // evaluated bytes that are also in calibration texts
  std::string device;
  bool interrupted = false;              // the figures cover the work until then
  std::vector<double> exact_perplexity;  // indexed by context
  std::vector<int> contexts;
  std::vector<QualityRow> rows;  // sorted by context, then as the methods are
};

// Errors of the options are found before anything is measured. kInvalidArgument: the texts are too
// short for two sequences, calibration text is evaluated, a method is unknown or lacks calibration
// text, or the context exceeds the model's or is too short for passkeys. kFailedPrecondition: the
// device is cuda and there is none. kCancelled: it was interrupted before the first figure. Errors
// of the model and of calibration are returned.
absl::StatusOr<QualityResult> RunQualityWorkload(const QualityOptions& options);

}  // namespace crumb::bench
