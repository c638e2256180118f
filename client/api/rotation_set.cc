// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/rotation_set.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "common/hex.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

constexpr double kOrthogonalTolerance = 1e-3;  // above the error of rounding a rotation to BF16

absl::Status CheckArray(const char* name, const std::vector<float>& values, size_t expected) {
  if (!values.empty() && values.size() != expected) {
    return absl::InvalidArgumentError(std::string(name) + " has " + std::to_string(values.size()) +
                                      " values, its shape needs " + std::to_string(expected));
  }
  for (const float value : values) {
    if (!std::isfinite(value)) {
      return absl::InvalidArgumentError(std::string(name) + " holds a value that is not finite");
    }
  }
  return absl::OkStatus();
}

// Checks that matrix times the transpose of `other` is the identity.
absl::Status CheckInverse(const std::string& what, const float* matrix, const float* other,
                          int dim) {
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      double dot = 0.0;
      for (int c = 0; c < dim; ++c) dot += double{matrix[i * dim + c]} * other[j * dim + c];
      if (!(std::abs(dot - (i == j ? 1.0 : 0.0)) <= kOrthogonalTolerance)) {
        return absl::InvalidArgumentError(what + " at rows " + std::to_string(i) + ", " +
                                          std::to_string(j));
      }
    }
  }
  return absl::OkStatus();
}

// Checks the diagonal of each matrix [dim, dim] of `feedback`, which must be weights above 0 or
// zeros (kernels::RowTransform::feedback).
absl::Status CheckWeights(const std::string& name, const std::vector<float>& feedback, int dim) {
  const size_t item = static_cast<size_t>(dim) * dim;
  for (size_t matrix = 0; matrix * item < feedback.size(); ++matrix) {
    const float* const values = &feedback[matrix * item];
    int positive = 0, zeros = 0;
    for (int i = 0; i < dim; ++i) {
      const float weight = values[static_cast<size_t>(i) * (dim + 1)];
      positive += weight > 0 ? 1 : 0;
      zeros += weight == 0 ? 1 : 0;
    }
    if (positive == dim || zeros == dim) continue;
    return absl::InvalidArgumentError(
        name + ", matrix " + std::to_string(matrix) + ", has " + std::to_string(positive) +
        " weights above 0 and " + std::to_string(zeros) + " zeros on its diagonal of " +
        std::to_string(dim) + "; all must be above 0, or all 0. Calibrate again");
  }
  return absl::OkStatus();
}

// Returns mean [heads, blocks, dim] times rotation [heads, dim, dim].
std::vector<float> Rotate(const std::vector<float>& mean, const std::vector<float>& rotation,
                          int blocks, int dim) {
  if (mean.empty() || rotation.empty()) return mean;
  std::vector<float> out(mean.size());
  for (size_t row = 0; row < mean.size() / dim; ++row) {
    const float* x = &mean[row * dim];
    const float* matrix = &rotation[row / blocks * dim * dim];
    for (int c = 0; c < dim; ++c) {
      double sum = 0.0;
      for (int i = 0; i < dim; ++i) sum += double{x[i]} * matrix[static_cast<size_t>(i) * dim + c];
      out[row * dim + c] = static_cast<float>(sum);
    }
  }
  return out;
}

// Transposes [heads, blocks, dim] to [heads, dim, blocks].
std::vector<float> Transpose(const std::vector<float>& mean, int blocks, int dim) {
  std::vector<float> out(mean.size());
  const size_t item = static_cast<size_t>(blocks) * dim;
  for (size_t i = 0; i < mean.size(); ++i) {
    const size_t head = i / item, block = i % item / dim, channel = i % dim;
    out[head * item + channel * blocks + block] = mean[i];
  }
  return out;
}

// Returns the heads `wanted` of one layer of `values` [layers, heads, item]; a single head is
// repeated.
std::vector<float> LayerOf(const std::vector<float>& values, int layer, int heads,
                           IndexRange wanted, size_t item) {
  if (values.empty()) return {};
  const float* begin = values.data() + layer * heads * item;
  std::vector<float> out;
  out.reserve(wanted.size() * item);
  for (int h = wanted.begin; h < wanted.end; ++h) {
    const float* head = begin + (heads == 1 ? 0 : h) * item;
    out.insert(out.end(), head, head + item);
  }
  return out;
}

absl::Status CheckRotations(const std::string& side, const std::vector<float>& rotations,
                            const std::vector<float>& duals, int dim) {
  if (!duals.empty() && rotations.empty()) {
    return absl::InvalidArgumentError("dual_" + side + " without rotation_" + side);
  }
  const std::string what = duals.empty()
                               ? "rotation_" + side + " is not orthogonal"
                               : "dual_" + side + " is not the inverse of rotation_" + side;
  const std::vector<float>& others = duals.empty() ? rotations : duals;
  const size_t item = static_cast<size_t>(dim) * dim;
  for (size_t at = 0; at < rotations.size(); at += item) {
    CRUMB_RETURN_IF_ERROR(CheckInverse(what, &rotations[at], &others[at], dim));
  }
  return absl::OkStatus();
}

Digest DigestOf(const std::string& name, const RotationSet::Arrays& arrays) {
  std::string bytes = "crumb/rotation/1\n" + name;
  const auto append = [&bytes](const std::vector<float>& values) {
    bytes += "\n" + std::to_string(values.size()) + "\n";
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  };
  for (const int size : {arrays.layers, arrays.kv_heads, arrays.head_dim, arrays.position_blocks,
                         arrays.pages_per_position_block, arrays.q_heads}) {
    bytes += "\n" + std::to_string(size);
  }
  for (const auto* values : {&arrays.rotation_k, &arrays.rotation_v, &arrays.mean_k, &arrays.mean_v,
                             &arrays.feedback_k, &arrays.feedback_v, &arrays.shift}) {
    append(*values);
  }
  // Sets without duals keep the digest that they had before there were any.
  for (const auto* values : {&arrays.dual_k, &arrays.dual_v}) {
    if (arrays.dual_k.empty() && arrays.dual_v.empty()) break;
    append(*values);
  }
  return Sha256(bytes);
}

}  // namespace

RotationSet RotationSet::Make(std::string name, Arrays arrays) {
  auto data = std::make_shared<Data>();
  data->digest = DigestOf(name, arrays);
  data->name = std::move(name);
  data->arrays = std::move(arrays);
  return RotationSet(std::move(data));
}

RotationSet RotationSet::Identity() { return Make("identity", {}); }

absl::StatusOr<RotationSet> RotationSet::Hadamard(int head_dim) {
  if (head_dim < 1 || !std::has_single_bit(static_cast<unsigned>(head_dim))) {
    return absl::InvalidArgumentError("a Hadamard rotation needs a power of two, head_dim is " +
                                      std::to_string(head_dim));
  }
  Arrays arrays;
  arrays.head_dim = head_dim;
  arrays.rotation_k.resize(static_cast<size_t>(head_dim) * head_dim);
  const float value = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (int i = 0; i < head_dim; ++i) {
    for (int c = 0; c < head_dim; ++c) {
      const bool odd = std::popcount(static_cast<unsigned>(i & c)) % 2 == 1;
      arrays.rotation_k[static_cast<size_t>(i) * head_dim + c] = odd ? -value : value;
    }
  }
  arrays.rotation_v = arrays.rotation_k;
  return Make("hadamard", std::move(arrays));
}

absl::StatusOr<RotationSet> RotationSet::Of(const std::string& name, Arrays arrays) {
  if (arrays.layers < 1 || arrays.kv_heads < 1 || arrays.head_dim < 1 ||
      arrays.position_blocks < 1 || arrays.pages_per_position_block < 1) {
    return absl::InvalidArgumentError(
        "a rotation set needs layers, kv_heads, head_dim and position blocks");
  }
  const size_t matrices = static_cast<size_t>(arrays.layers) * arrays.kv_heads;
  const size_t dim = arrays.head_dim;
  CRUMB_RETURN_IF_ERROR(CheckArray("rotation_k", arrays.rotation_k, matrices * dim * dim));
  CRUMB_RETURN_IF_ERROR(CheckArray("rotation_v", arrays.rotation_v, matrices * dim * dim));
  CRUMB_RETURN_IF_ERROR(CheckArray("dual_k", arrays.dual_k, matrices * dim * dim));
  CRUMB_RETURN_IF_ERROR(CheckArray("dual_v", arrays.dual_v, matrices * dim * dim));
  CRUMB_RETURN_IF_ERROR(
      CheckArray("mean_k", arrays.mean_k, matrices * arrays.position_blocks * dim));
  CRUMB_RETURN_IF_ERROR(CheckArray("mean_v", arrays.mean_v, matrices * dim));
  CRUMB_RETURN_IF_ERROR(CheckArray("feedback_k", arrays.feedback_k, matrices * dim * dim));
  CRUMB_RETURN_IF_ERROR(CheckArray("feedback_v", arrays.feedback_v, matrices * dim * dim));
  CRUMB_RETURN_IF_ERROR(
      CheckArray("shift", arrays.shift, static_cast<size_t>(arrays.layers) * arrays.q_heads));
  CRUMB_RETURN_IF_ERROR(CheckArray("attention_error", arrays.attention_error, matrices));
  CRUMB_RETURN_IF_ERROR(CheckRotations("k", arrays.rotation_k, arrays.dual_k, arrays.head_dim));
  CRUMB_RETURN_IF_ERROR(CheckRotations("v", arrays.rotation_v, arrays.dual_v, arrays.head_dim));
  CRUMB_RETURN_IF_ERROR(CheckWeights("feedback_k", arrays.feedback_k, arrays.head_dim));
  CRUMB_RETURN_IF_ERROR(CheckWeights("feedback_v", arrays.feedback_v, arrays.head_dim));
  return Make(name, std::move(arrays));
}

absl::StatusOr<RotationSet> RotationSet::FromFile(const RotationFile& file,
                                                  const std::string& path) {
  Arrays arrays{.layers = file.layers,
                .kv_heads = file.kv_heads,
                .head_dim = file.head_dim,
                .rotation_k = file.rotation_k,
                .rotation_v = file.rotation_v,
                .dual_k = file.dual_k,
                .dual_v = file.dual_v,
                .position_blocks = file.position_blocks,
                .pages_per_position_block = file.pages_per_position_block,
                .q_heads = file.q_heads,
                .mean_k = file.mean_k,
                .mean_v = file.mean_v,
                .feedback_k = file.feedback_k,
                .feedback_v = file.feedback_v,
                .shift = file.shift,
                .attention_error = file.attention_error};
  const absl::StatusOr<RotationSet> checked =
      Of(path + ", " + file.method + " for " + (file.model.empty() ? "any model" : file.model),
         std::move(arrays));
  if (!checked.ok()) {
    return absl::InvalidArgumentError(path + ": " + std::string(checked.status().message()));
  }
  auto data = std::make_shared<Data>(*checked->data_);
  HexDecode(RotationDigest(file), data->digest);
  return RotationSet(std::move(data));
}

std::optional<double> RotationSet::ExpectedAttentionError(const TileRange& tiles) const {
  const Arrays& arrays = data_->arrays;
  if (arrays.attention_error.empty()) return std::nullopt;
  double sum = 0.0;
  for (int layer = tiles.layers.begin; layer < tiles.layers.end; ++layer) {
    const int from = arrays.layers == 1 ? 0 : layer;
    for (const float error :
         LayerOf(arrays.attention_error, from, arrays.kv_heads, tiles.heads, 1)) {
      sum += error;
    }
  }
  return sum / (tiles.layers.size() * tiles.heads.size());
}

absl::Status RotationSet::CheckFits(int layers, int kv_heads, int q_heads, int head_dim) const {
  const Arrays& arrays = data_->arrays;
  if ((arrays.head_dim != 0 && arrays.head_dim != head_dim) ||
      (arrays.layers != 1 && arrays.layers != layers) ||
      (arrays.kv_heads != 1 && arrays.kv_heads != kv_heads) ||
      (!arrays.shift.empty() && arrays.q_heads != q_heads)) {
    const auto sizes = [](int l, int kv, int q, int dim) {
      const auto count = [](int n) { return n > 1 ? std::to_string(n) : "any number of"; };
      return count(l) + " layers, " + count(kv) + " KV heads, " +
             (q > 0 ? std::to_string(q) + " query heads, " : "") + "head_dim " +
             std::to_string(dim);
    };
    return absl::InvalidArgumentError(
        "rotations '" + name() + "' are for " +
        sizes(arrays.layers, arrays.kv_heads, arrays.q_heads, arrays.head_dim) +
        "; the model has layers " + std::to_string(layers) + ", KV heads " +
        std::to_string(kv_heads) + ", query heads " + std::to_string(q_heads) + ", head_dim " +
        std::to_string(head_dim));
  }
  return absl::OkStatus();
}

std::vector<std::shared_ptr<const RotationSet::Layer>> RotationSet::Expand(int layers,
                                                                           int kv_heads) const {
  const auto end = [](int count) { return IndexRange{0, static_cast<uint16_t>(count)}; };
  return Expand(TileRange{end(layers), end(kv_heads)}, end(data_->arrays.q_heads));
}

std::vector<std::shared_ptr<const RotationSet::Layer>> RotationSet::Expand(
    const TileRange& tiles, IndexRange q_heads) const {
  const Arrays& arrays = data_->arrays;
  const size_t dim = arrays.head_dim;
  std::vector<std::shared_ptr<const Layer>> out;
  for (int i = tiles.layers.begin; i < tiles.layers.end; ++i) {
    if (arrays.layers == 1 && !out.empty()) {
      out.push_back(out.front());
      continue;
    }
    auto layer = std::make_shared<Layer>();
    const int from = arrays.layers == 1 ? 0 : i;
    const auto take = [&](const std::vector<float>& values, size_t item) {
      return LayerOf(values, from, arrays.kv_heads, tiles.heads, item);
    };
    layer->rotation_k_ = take(arrays.rotation_k, dim * dim);
    layer->rotation_v_ = take(arrays.rotation_v, dim * dim);
    layer->dual_k_ = take(arrays.dual_k, dim * dim);
    layer->dual_v_ = take(arrays.dual_v, dim * dim);
    const int blocks = arrays.position_blocks;
    const std::vector<float> mean_k = take(arrays.mean_k, blocks * dim);
    layer->mean_k_columns_ = Transpose(mean_k, blocks, arrays.head_dim);
    layer->rotated_mean_k_ = Rotate(mean_k, layer->rotation_k_, blocks, arrays.head_dim);
    layer->rotated_mean_v_ =
        Rotate(take(arrays.mean_v, dim), layer->rotation_v_, 1, arrays.head_dim);
    layer->feedback_k_ = take(arrays.feedback_k, dim * dim);
    layer->feedback_v_ = take(arrays.feedback_v, dim * dim);
    layer->shift_ = LayerOf(arrays.shift, from, arrays.q_heads, q_heads, 1);
    out.push_back(std::move(layer));
  }
  return out;
}

}  // namespace crumb::client
