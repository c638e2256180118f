// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

// Workload `decode`: whole decode steps of real models' shapes on the first GPU, INT2 pages against
// BF16 keys and values. crumb-decode-bench measures them, which needs nothing but a driver and
// cuBLAS; this program runs it.
namespace crumb::bench {

struct DecodeOptions {
  std::string program;                             // crumb-decode-bench, beside crumb-bench
  std::vector<std::string> shapes = {"qwen3-8b"};  // of ModelShapeNames()
  int context = 102400;                            // tokens of each sequence
  std::vector<int> batches = {1, 8, 32};
  std::vector<std::string> formats = {"bf16", "int2"};
  double memory_gb = 80;  // the largest batch that fits into so much is measured too
};

// The arguments `program` is run with.
std::vector<std::string> DecodeArguments(const DecodeOptions& options, bool json,
                                         const std::string& commit);

// Replaces this process by `program`: its output and exit code are this program's. Returns only
// when that fails. kNotFound: the program is not there, the build had no CUDA.
absl::Status RunDecode(const DecodeOptions& options, bool json, const std::string& commit);

}  // namespace crumb::bench
