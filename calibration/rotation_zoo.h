// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/rotation_file.h"

namespace crumb::calibration {

enum class Side { kKeys, kValues };

// One file of RotationZoo: the rotations of K or of V, as OSCAR's own tools write and load them.
struct RotationZooFile {
  std::string objective;       // "qqt_r_h_pbr", "sst_r_h_pbr", "hadamard"...
  int format_version = 1;      // 1: one rotation per layer; 2: one per KV head
  std::vector<int> layer_ids;  // ascending, with gaps where layers have no full attention
  int kv_heads = 1;            // 1 in version 1
  int head_dim = 0;
  std::vector<float> rotation;     // [layers, kv_heads, head_dim, head_dim], y = x R
  std::vector<float> eigenvalues;  // [layers, kv_heads, head_dim] ascending, or empty
};

// Which side a file is for, by its objective or its name; nothing: they do not say.
std::optional<Side> SideOf(const RotationZooFile& file, const std::string& path);

// kNotFound: no such file. kInvalidArgument, kDataLoss name file and entry or tensor: damaged, of
// another version, layers of unlike shapes, a matrix that is no rotation. Executes nothing of it.
absl::StatusOr<RotationZooFile> ReadRotationZoo(const std::string& path);

// Writes what PyTorch's torch.load reads. To a temporary name, then renamed.
absl::Status WriteRotationZoo(const RotationZooFile& file, const std::string& path);

// A rotation file of method oscar (hadamard when both objectives say so) with its published clips;
// either side may be missing and then is not rotated. kInvalidArgument: the sides do not fit.
absl::StatusOr<RotationFile> FromRotationZoo(const RotationZooFile* keys,
                                             const RotationZooFile* values);

// One side of a rotation file, which loses all but rotations and eigenvalues. A file for all layers
// or all KV heads is repeated for `layers` and `kv_heads`; 0: as many as it has. kInvalidArgument:
// version 1 of rotations that differ between heads, or that side has no rotations.
absl::StatusOr<RotationZooFile> ToRotationZoo(const RotationFile& file, Side side,
                                              int format_version, int layers, int kv_heads);

}  // namespace crumb::calibration
