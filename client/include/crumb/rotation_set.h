// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/sha256.h"

namespace crumb::client {

// The static data of a quantization method: rotations and means per layer and global KV head. An
// immutable value; copies share the arrays. Thread-safe.
class RotationSet {
 public:
  // Arrays in the model's basis. A leading dimension of 1 is repeated for all layers or KV heads;
  // an empty array means identity (rotations) or zero (means, shift).
  struct Arrays {
    int layers = 1;
    int kv_heads = 1;
    int head_dim = 0;
    std::vector<float> rotation_k;  // [layers, kv_heads, head_dim, head_dim], y = x R, orthogonal
    std::vector<float> rotation_v;  // the same
    std::vector<float> mean_k;      // [layers, kv_heads, head_dim] subtracted before rotation
    std::vector<float> mean_v;      // the same
  };

  // No rotation and no mean.
  static RotationSet Identity();

  // Data-free: the normalised Sylvester-Hadamard matrix for K and V, of every layer and head. It is
  // symmetric and its own inverse. kInvalidArgument: head_dim is no power of two.
  static absl::StatusOr<RotationSet> Hadamard(int head_dim);

  // `name` is for people; the digest covers name and arrays. kInvalidArgument: an array of the
  // wrong size, a value that is not finite, or a rotation that is not orthogonal to 1e-3.
  static absl::StatusOr<RotationSet> Of(const std::string& name, Arrays arrays);

  const std::string& name() const { return data_->name; }
  const Digest& digest() const { return data_->digest; }
  // 0: fits every head_dim.
  int head_dim() const { return data_->arrays.head_dim; }
  // OK when the arrays serve a model of this shape.
  absl::Status CheckFits(int layers, int kv_heads, int head_dim) const;

  // Data of one layer, [kv_heads, ...] for `kv_heads` of the model; null: identity or zero.
  class Layer {
   public:
    const float* rotation_k() const { return Pointer(rotation_k_); }
    const float* rotation_v() const { return Pointer(rotation_v_); }
    const float* mean_k() const { return Pointer(mean_k_); }                  // mu_k
    const float* rotated_mean_k() const { return Pointer(rotated_mean_k_); }  // mu_k R_K
    const float* rotated_mean_v() const { return Pointer(rotated_mean_v_); }  // mu_v R_V

   private:
    friend class RotationSet;
    static const float* Pointer(const std::vector<float>& values) {
      return values.empty() ? nullptr : values.data();
    }
    std::vector<float> rotation_k_, rotation_v_, mean_k_, rotated_mean_k_, rotated_mean_v_;
  };

  // The layers of a model of this shape; layers that are equal share memory.
  std::vector<std::shared_ptr<const Layer>> Expand(int layers, int kv_heads) const;

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
