// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/calibrator.h"
#include "calibration/linear_weight.h"
#include "common/rotation_file.h"
#include "models/checkpoint.h"
#include "nlohmann/json.hpp"

namespace crumb::tools {

// The value and output projections of a model directory. Any architecture is supported whose
// tensors are named PREFIX.layers.N.self_attn.{v_proj,o_proj}.weight. Immutable, so thread-safe.
class AttentionWeights {
 public:
  // One linear layer as it is stored.
  struct Projection {
    RawTensor weight;
    std::optional<RawTensor> scale;  // scale of FP8 weights
    std::optional<RawTensor> bias;
    bool static_input_scale = false;  // FP8 activations have a fixed, measured scale

    // Returns the weight in FP32, with an FP8 scale multiplied in.
    absl::StatusOr<calibration::LinearWeight> Decode() const;
  };

  // kNotFound, kInvalidArgument name file and tensor: a shard or the tensors are missing, or FP8
  // has scales per block.
  static absl::StatusOr<std::unique_ptr<AttentionWeights>> Open(const std::string& dir);

  // The fields of config.json; for a multimodal model, those of its text part.
  const nlohmann::json& config() const { return config_; }
  int layers() const { return layers_; }
  int q_heads() const { return q_heads_; }
  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }

  // Returns OK if everything between values and o_proj is linear in values, so that a rotation can
  // be folded. kInvalidArgument: the attention has an output gate, or a norm behind v_proj; the
  // message names the field or the tensor.
  absl::Status CheckLinearInValues() const;
  // Returns the model's numbers of the layers for which `file` has rotations. Messages name `path`.
  // kInvalidArgument: the file is for another geometry.
  absl::StatusOr<std::vector<int>> LayersOf(const RotationFile& file,
                                            const std::string& path) const;
  // Checks that both projections exist with the shapes that follow from config.json.
  absl::Status CheckLayer(int layer) const;

  // Return v_proj, [kv_heads * head_dim, hidden], and o_proj, [hidden, q_heads * head_dim], of a
  // layer with scale and bias if they exist. The bytes are mapped from the files and live as long
  // as this object. kNotFound, kInvalidArgument: a tensor is missing or has another shape.
  absl::StatusOr<Projection> ValueProjection(int layer) const;
  absl::StatusOr<Projection> OutputProjection(int layer) const;
  // Decodes a bias as a matrix of one row.
  static absl::StatusOr<calibration::LinearWeight> DecodeBias(const RawTensor& bias);
  // Releases the memory of a projection's mapped bytes.
  void Release(const Projection& projection) const;

 private:
  AttentionWeights(std::string dir, nlohmann::json config,
                   std::unique_ptr<models::Checkpoint> checkpoint)
      : dir_(std::move(dir)), config_(std::move(config)), checkpoint_(std::move(checkpoint)) {}
  // Reads the sizes from config.json; head_dim is hidden_size / num_attention_heads if it is not
  // given.
  absl::Status ReadSizes();
  // Finds the prefix before "layers." in the names of tensors. kInvalidArgument: no tensor fits, or
  // those of more than one set of layers do.
  absl::Status FindPrefix();
  // Returns the projection `name` of a layer after a check that its weight has `rows` and
  // `columns`.
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

// Returns the Hessians of the layer's output error with respect to values, C = sum over the KV
// head's query heads of W_o,h' W_o,h, computed from the o_proj of a model directory layer by layer.
// kInvalidArgument, kNotFound name file and tensor: weights are missing, or have another geometry
// than `shape`.
absl::StatusOr<calibration::ValueHessians> OutputProjectionHessians(
    const std::string& model, const calibration::ModelShape& shape);

}  // namespace crumb::tools
