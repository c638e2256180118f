// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/activation_source.h"
#include "common/safetensors.h"

namespace crumb::calibration {

// Activations that an engine wrote to safetensors files: `layers.N.q`, `layers.N.k`, `layers.N.v`
// [tokens, heads, head_dim] after RoPE, and `positions` [tokens]; docs/formats/activations.md. One
// layer of one sequence is in memory at a time.
class FileActivations : public ActivationSource {
 public:
  // Opens all files and checks their headers. `layer_ids` are the layers that must be present; if
  // it is empty, those from 0 to the highest. kNotFound, kInvalidArgument name file and tensor: a
  // tensor is missing or has another shape than the others, or there are too few tokens.
  static absl::StatusOr<std::unique_ptr<FileActivations>> Open(
      const std::vector<std::string>& files, const std::vector<int>& layer_ids);

  // Sets the properties of the model that the files do not contain. REQUIRES: the rotary channels
  // are below head_dim.
  void Describe(const std::string& name, const std::string& rope, RotaryPairs rotary);

  // Returns a metadata field of the files, or "". kInvalidArgument: two files contradict each
  // other.
  absl::StatusOr<std::string> Metadata(const std::string& field) const;

  const ModelShape& shape() const override { return shape_; }
  int layers_per_walk() const override { return 1; }
  int64_t visits() const override { return visits_; }
  absl::Status ForEach(int first, int count, const Visitor& visit) override;

 private:
  // Tokens of one file at consecutive positions.
  struct Run {
    int64_t begin = 0;  // row
    int tokens = 0;
    int first_position = 0;
  };
  struct File {
    std::unique_ptr<SafetensorsFile> tensors;
    int64_t tokens = 0;
    std::vector<Run> runs;
  };

  FileActivations() = default;
  absl::Status AddFile(const std::string& path);
  absl::Status ReadPositions(File& file) const;
  absl::Status AddLayer(int id, size_t file);
  absl::StatusOr<std::array<Tensor, 3>> TensorsOf(const File& file, int id) const;
  absl::Status CheckShapes(const std::array<Tensor, 3>& tensors, int64_t tokens);
  absl::Status CheckLayers(const std::vector<int>& layer_ids);
  absl::Status VisitRun(const File& file, const std::array<Tensor, 3>& tensors, int layer,
                        const Run& run, const Visitor& visit);

  ModelShape shape_;
  std::vector<File> files_;
  std::map<int, std::vector<size_t>> files_of_;  // layer id -> files
  int64_t visits_ = 0;
  std::array<std::vector<kernels::Bf16>, 3> rows_;  // q, k and v of one run
};

}  // namespace crumb::calibration
