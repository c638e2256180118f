// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/fragment_header.h"
#include "common/rotation_file.h"
#include "common/sha256.h"

namespace crumb::client {

// RotationSet is the calibration data of a quantization method: rotations and means per layer and
// global KV head. An immutable value whose copies refer to the same arrays. Thread-safe.
//
// A rotation spreads the outliers of keys and values over all channels before they are quantized,
// because one scale serves a whole group. docs/quality/methods.md has the methods and their arrays,
// docs/formats/rotation.md the file. The rotations of 36 layers with 8 KV heads of 128 channels
// take 38 MB.
//
// The digest is a part of the keyspace, so pages that were written with different rotations never
// meet. Engines whose projections contain R_V already (`crumb absorb`) use a file without
// rotation_v.
class RotationSet {
 public:
  // Arrays in the model's basis. A leading dimension of 1 is repeated for all layers or KV heads.
  // An empty array means identity (rotations) or zero (all others). History page p, counted from
  // the end of the sink, uses the means of block min(p / pages_per_position_block, position_blocks
  // - 1).
  struct Arrays {
    int layers = 1;
    int kv_heads = 1;
    int head_dim = 0;
    std::vector<float> rotation_k;  // [layers, kv_heads, head_dim, head_dim], y = x R
    std::vector<float> rotation_v;  // shape of rotation_k
    // The duals have the shape of rotation_k: Q with R Q' = I. Queries are multiplied by Q, and its
    // transpose maps rows back. Empty: R is orthogonal, so that Q is R.
    std::vector<float> dual_k;
    std::vector<float> dual_v;
    int position_blocks = 1;
    int pages_per_position_block = 1;
    int q_heads = 0;                // used only with `shift`
    std::vector<float> mean_k;      // [layers, kv_heads, position_blocks, head_dim], subtracted
    std::vector<float> mean_v;      // [layers, kv_heads, head_dim]         before rotation
    std::vector<float> feedback_k;  // [layers, kv_heads, head_dim, head_dim], method crumb only
    std::vector<float> feedback_v;  // shape of feedback_k
    std::vector<float> shift;       // [layers, q_heads], nats subtracted from INT2 logits
    // [layers, kv_heads], expected of evicted windows. It is not part of the digest, because pages
    // do not depend on it.
    std::vector<float> attention_error;
  };

  // Returns a set without rotation and mean.
  static RotationSet Identity();

  // Returns the normalized Sylvester-Hadamard matrix for K and V of every layer and head. It needs
  // no data, and is symmetric and its own inverse. kInvalidArgument: head_dim is not a power of
  // two. It is the default of the C interface.
  static absl::StatusOr<RotationSet> Hadamard(int head_dim);

  // The digest covers `name`, which is otherwise for people, and all arrays except attention_error.
  // kInvalidArgument: an array of the wrong size, a value that is not finite, a dual that does not
  // invert its rotation to within 1e-3, or a feedback diagonal that is neither all > 0 nor all 0.
  static absl::StatusOr<RotationSet> Of(const std::string& name, Arrays arrays);

  // Returns the contents of a rotation file, with the file's digest. Error messages refer to the
  // file as `path`. Errors as for Of.
  static absl::StatusOr<RotationSet> FromFile(const RotationFile& file, const std::string& path);

  const std::string& name() const { return data_->name; }
  const Digest& digest() const { return data_->digest; }
  // 0: the set fits every head_dim.
  int head_dim() const { return data_->arrays.head_dim; }
  // Returns OK if the arrays fit a model of this shape: leading dimensions are equal or 1, and
  // head_dim is equal. kInvalidArgument names both shapes.
  absl::Status CheckFits(int layers, int kv_heads, int q_heads, int head_dim) const;
  // Returns the attention error that the quality watch should measure in a worker with these layers
  // and KV heads, averaged over them; empty if the calibration did not record it.
  std::optional<double> ExpectedAttentionError(const TileRange& tiles) const;
  int position_blocks() const { return data_->arrays.position_blocks; }
  int pages_per_position_block() const { return data_->arrays.pages_per_position_block; }

  // Data of one layer, [kv_heads, ...] for the expanded KV heads. A null pointer means identity or
  // zero.
  //
  // It is the form that kernels take: contiguous floats, heads repeated as often as the rank has
  // them, and the products that kernels would otherwise compute for every page (mu R). Pointers are
  // valid as long as the Layer.
  class Layer {
   public:
    const float* rotation_k() const { return Pointer(rotation_k_); }
    const float* rotation_v() const { return Pointer(rotation_v_); }
    // Q with R Q' = I: queries are q Q, keys and outputs come back as y Q'. R where it is
    // orthogonal.
    const float* dual_k() const { return dual_k_.empty() ? rotation_k() : dual_k_.data(); }
    const float* dual_v() const { return dual_v_.empty() ? rotation_v() : dual_v_.data(); }
    // mu_k, [kv_heads, head_dim, position_blocks].
    const float* mean_k_columns() const { return Pointer(mean_k_columns_); }
    // mu_k R_K, [kv_heads, position_blocks, head_dim].
    const float* rotated_mean_k() const { return Pointer(rotated_mean_k_); }
    const float* rotated_mean_v() const { return Pointer(rotated_mean_v_); }  // mu_v R_V
    const float* feedback_k() const { return Pointer(feedback_k_); }
    const float* feedback_v() const { return Pointer(feedback_v_); }
    const float* shift() const { return Pointer(shift_); }  // [q_heads]

   private:
    friend class RotationSet;
    static const float* Pointer(const std::vector<float>& values) {
      return values.empty() ? nullptr : values.data();
    }
    std::vector<float> rotation_k_, rotation_v_, dual_k_, dual_v_;
    std::vector<float> mean_k_columns_, rotated_mean_k_, rotated_mean_v_;
    std::vector<float> feedback_k_, feedback_v_, shift_;
  };

  // Returns the layers of a model of this shape; equal layers refer to the same memory. The
  // products are computed here, so that the call takes time and memory in proportion to layers x
  // heads x head_dim^2: call it once, when a worker is opened. REQUIRES: CheckFits of this shape
  // returns OK.
  std::vector<std::shared_ptr<const Layer>> Expand(int layers, int kv_heads) const;
  // Returns these layers of a model that fits, each with these KV heads and query heads.
  std::vector<std::shared_ptr<const Layer>> Expand(const TileRange& tiles,
                                                   IndexRange q_heads) const;

 private:
  struct Data {
    std::string name;
    Arrays arrays;
    Digest digest{};
  };
  explicit RotationSet(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
  static RotationSet Make(std::string name, Arrays arrays);

  std::shared_ptr<const Data> data_;
};

}  // namespace crumb::client
