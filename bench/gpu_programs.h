// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

// The workloads on a GPU. A separate program measures each of them; it needs only a driver (and
// cuBLAS for decode), and crumb-bench runs it in its place.
namespace crumb::bench {

// Workload `kernels`: the CUDA kernels on the first GPU.
struct KernelsOptions {
  std::string program;    // crumb-kernel-bench, beside crumb-bench
  std::vector<int> only;  // decode rows by number; empty: all rows
};

// Workload `decode`: whole decode steps of real models' shapes on the first GPU, INT2 pages
// compared with BF16 keys and values.
struct DecodeOptions {
  std::string program;                             // crumb-decode-bench, beside crumb-bench
  std::vector<std::string> shapes = {"qwen3-8b"};  // names of ModelShapeNames()
  int context = 102400;                            // tokens of each sequence
  std::vector<int> batches = {1, 8, 32};
  std::vector<std::string> formats = {"bf16", "int2"};
  double memory_gb = 80;  // memory of the largest batch, which is measured as well
};

// Return the arguments with which `program` is run.
std::vector<std::string> KernelsArguments(const KernelsOptions& options, bool json,
                                          const std::string& commit);
std::vector<std::string> DecodeArguments(const DecodeOptions& options, bool json,
                                         const std::string& commit);

// Replace this process by `program`, so that its output and exit code are this program's. They
// return only if that fails. kNotFound: the program does not exist, because the build had no CUDA.
absl::Status RunKernels(const KernelsOptions& options, bool json, const std::string& commit);
absl::Status RunDecode(const DecodeOptions& options, bool json, const std::string& commit);

}  // namespace crumb::bench
