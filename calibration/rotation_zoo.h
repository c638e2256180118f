// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/rotation_file.h"

namespace crumb::calibration {

// The tensors that the rotations of a file are for.
enum class Side { kKeys, kValues };

// A file of RotationZoo: the rotations of K or of V in the format of OSCAR's tools.
struct RotationZooFile {
  std::string objective;       // "qqt_r_h_pbr", "sst_r_h_pbr", "hadamard"...
  int format_version = 1;      // 1: one rotation per layer; 2: one per KV head
  std::vector<int> layer_ids;  // ascending, with gaps where layers have no full attention
  int kv_heads = 1;            // 1 in version 1
  int head_dim = 0;
  std::vector<float> rotation;     // [layers, kv_heads, head_dim, head_dim], y = x R
  std::vector<float> eigenvalues;  // [layers, kv_heads, head_dim] ascending, or empty
};

// Returns the side that a file is for, by its objective or its name, or nothing if neither names
// it.
std::optional<Side> SideOf(const RotationZooFile& file, const std::string& path);

// Reads a file without executing anything in it. kNotFound: no such file. kInvalidArgument,
// kDataLoss name the file and the entry or tensor: it is damaged or has another version, layers
// differ in shape, or a matrix is no rotation.
absl::StatusOr<RotationZooFile> ReadRotationZoo(const std::string& path);

// Writes a file that PyTorch's torch.load reads, under a temporary name that is renamed at the end.
absl::Status WriteRotationZoo(const RotationZooFile& file, const std::string& path);

// Returns a rotation file of method oscar (hadamard if both objectives name it) with its published
// clips. A side may be null and is not rotated then. kInvalidArgument: the sides do not fit.
absl::StatusOr<RotationFile> FromRotationZoo(const RotationZooFile* keys,
                                             const RotationZooFile* values);

// Returns one side of a rotation file; only rotations and eigenvalues are kept. A file for all
// layers or all KV heads is repeated for `layers` and `kv_heads`; 0 means as many as it has.
// kInvalidArgument: version 1 was requested and heads differ, or the side has no rotations.
absl::StatusOr<RotationZooFile> ToRotationZoo(const RotationFile& file, Side side,
                                              int format_version, int layers, int kv_heads);

}  // namespace crumb::calibration
