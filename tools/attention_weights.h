// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/linear_weight.h"
#include "common/rotation_file.h"
#include "models/checkpoint.h"
#include "nlohmann/json.hpp"

namespace crumb::tools {

// The value and output projections of a model directory of any architecture whose tensors are named
// PREFIX.layers.N.self_attn.{v_proj,o_proj}.weight. Immutable, so thread-safe.
class AttentionWeights {
 public:
  // One linear layer as it is stored.
  struct Projection {
    RawTensor weight;
    std::optional<RawTensor> scale;  // of FP8
    std::optional<RawTensor> bias;
    bool static_input_scale = false;  // FP8 activations with a scale that was measured

    absl::StatusOr<calibration::LinearWeight> Decode() const;
  };

  // kNotFound, kInvalidArgument name file and tensor: a missing shard, no such tensors, FP8 scales
  // per block.
  static absl::StatusOr<std::unique_ptr<AttentionWeights>> Open(const std::string& dir);

  // The model's config.json; of a multimodal model its text part.
  const nlohmann::json& config() const { return config_; }
  int layers() const { return layers_; }
  int q_heads() const { return q_heads_; }
  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }

  // OK when nothing stands between values, attention and o_proj that a rotation does not pass.
  absl::Status CheckLinearInValues() const;
  // The model's numbers of the layers that `file` has rotations for. kInvalidArgument: it is for
  // another geometry; `path` is what messages call it.
  absl::StatusOr<std::vector<int>> LayersOf(const RotationFile& file,
                                            const std::string& path) const;
  // Whether both projections are there, of the shapes that config.json asks for.
  absl::Status CheckLayer(int layer) const;

  absl::StatusOr<Projection> ValueProjection(int layer) const;
  absl::StatusOr<Projection> OutputProjection(int layer) const;
  // As a matrix of one row.
  static absl::StatusOr<calibration::LinearWeight> DecodeBias(const RawTensor& bias);
  // Gives the memory of a projection's mapped bytes back.
  void Release(const Projection& projection) const;

 private:
  AttentionWeights(std::string dir, nlohmann::json config,
                   std::unique_ptr<models::Checkpoint> checkpoint)
      : dir_(std::move(dir)), config_(std::move(config)), checkpoint_(std::move(checkpoint)) {}
  absl::Status ReadSizes();
  absl::Status FindPrefix();
  absl::StatusOr<Projection> Find(int layer, const std::string& name, int64_t rows,
                                  int64_t columns) const;

  const std::string dir_;
  const nlohmann::json config_;
  const std::unique_ptr<models::Checkpoint> checkpoint_;
  std::string prefix_;  // "model."
  int layers_ = 0;
  int q_heads_ = 0;
  int kv_heads_ = 0;
  int head_dim_ = 0;
  int hidden_ = 0;
};

}  // namespace crumb::tools
