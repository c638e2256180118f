// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

// The constants of a quantization method for one model, as calibration writes them and workers read
// them. The bytes are docs/formats/rotation.md.
namespace crumb {

struct RotationFile {
  std::string method;  // oscar, crumb or hadamard
  std::string model;   // a name for people
  std::string rope;    // the position embedding that means and covariances were built for
  int layers = 0;      // 1: all layers share one entry
  std::vector<int>
      layer_ids;     // the model's own numbers of the layers, ascending; empty: 0, 1, 2...
  int kv_heads = 0;  // 1: all KV heads share one entry
  int q_heads = 0;   // the model's query heads; 0 if nothing depends on them
  int head_dim = 0;
  int positions = 0;                 // serving context of means and covariances; 0: none
  int position_blocks = 1;           // block b is history pages [b * this, (b + 1) * this),
  int pages_per_position_block = 1;  // the last one everything behind it
  int64_t tokens = 0;                // calibration tokens that were used
  float clip_k = 0.0f;               // fraction of |y| kept; 0: all
  float clip_v = 0.0f;
  // The basis that V arrives in: "model", or "rotated" where R_V is folded into v_proj and o_proj.
  // Then rotation_v and dual_v are empty and mean_v stands in the rotated basis.
  std::string v_basis = "model";

  // Row-major; empty where the method has none.
  std::vector<float> rotation_k;     // [layers, kv_heads, head_dim, head_dim], y = x R
  std::vector<float> rotation_v;     // the same
  std::vector<float> dual_k;         // the same: Q with R Q' = I; empty: R is orthogonal
  std::vector<float> dual_v;         // the same
  std::vector<float> mean_k;         // [layers, kv_heads, position_blocks, head_dim], before R
  std::vector<float> mean_v;         // [layers, kv_heads, head_dim]
  std::vector<float> feedback_k;     // [layers, kv_heads, head_dim, head_dim], upper
  std::vector<float> feedback_v;     // the same
  std::vector<float> shift;          // [layers, q_heads] INT2 mass shift in nats
  std::vector<float> covariance_k;   // [layers, kv_heads, head_dim, head_dim] mean of q q'
  std::vector<float> covariance_v;   // the same, mean of v v' weighted by scores
  std::vector<float> eigenvalues_k;  // [layers, kv_heads, head_dim] ascending
  std::vector<float> eigenvalues_v;  // the same
  // [layers, kv_heads] of evicted windows, as the quality watch measures it, > 0. For the watch:
  // pages do not depend on it, so it is not in the digest.
  std::vector<float> attention_error;
};

// Returns the model's own number of layer `index` of the file, which error messages use.
int LayerId(const RotationFile& file, int index);

// Returns the hexadecimal SHA-256 of all fields and arrays except attention_error. Keyspaces
// contain it as the name of the file.
std::string RotationDigest(const RotationFile& file);

// Writes to a temporary name beside `path` and renames. kInvalidArgument: an array has the wrong
// size; then nothing is written.
absl::Status WriteRotationFile(const RotationFile& file, const std::string& path);

// kNotFound: no such file. kInvalidArgument names file and tensor: damaged, of another version, an
// array of the wrong shape or with a value that is not finite. kDataLoss: the digest differs.
absl::StatusOr<RotationFile> ReadRotationFile(const std::string& path);

}  // namespace crumb
