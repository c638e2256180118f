// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/linear_weight.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "common/little_endian.h"
#include "common/status_macros.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/fp8.h"

namespace crumb::calibration {
namespace {

constexpr char kFp8[] = "F8_E4M3";
// The least scale, so that rows of zeros have one, too.
constexpr float kScaleMin = 1e-12f;

absl::Status Wrong(const RawTensor& tensor, const std::string& what) {
  return absl::InvalidArgumentError(tensor.file + ": tensor " + tensor.name + ": " + what);
}

bool IsFloat(const std::string& dtype) {
  return dtype == "BF16" || dtype == "F16" || dtype == "F32";
}

float Load(const std::string& dtype, const std::byte* bytes, Eigen::Index index) {
  if (dtype == "F32") return LoadElement<float>(bytes, index);
  if (dtype == "BF16") return kernels::Bf16ToFloat({LoadElement<uint16_t>(bytes, index)});
  if (dtype == "F16") return kernels::Fp16ToFloat(LoadElement<uint16_t>(bytes, index));
  return kernels::Fp8ToFloat(LoadElement<uint8_t>(bytes, index));
}

template <typename T>
void Append(T value, std::vector<std::byte>& out) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(value));
}

// Sets `*saturated` if the dtype cannot represent the value.
void Store(const std::string& dtype, float value, std::vector<std::byte>& out, bool* saturated) {
  if (dtype == "F32") return Append(value, out);
  if (dtype == "BF16") return Append(kernels::Bf16FromFloat(value).bits, out);
  if (dtype == "F16") return Append(kernels::Fp16FromFloat(value, saturated), out);
  Append(kernels::Fp8FromFloat(value), out);
}

}  // namespace

absl::Status CheckScale(const RawTensor& weight, const RawTensor& scale) {
  if (!IsFloat(scale.dtype)) return Wrong(scale, "scales of dtype " + scale.dtype);
  int64_t count = 1;
  for (const int64_t size : scale.shape) count *= size;
  const bool one = count == 1;
  const bool per_row = !weight.shape.empty() && count == weight.shape[0] && !scale.shape.empty() &&
                       scale.shape[0] == weight.shape[0];
  if (one || per_row) return absl::OkStatus();
  return Wrong(scale, "shape " + ShapeText(scale.shape) + " for a weight " +
                          ShapeText(weight.shape) +
                          " is one scale per block; a rotation mixes channels of different blocks, "
                          "so every block would have to be quantized again at a loss: keep R_V at "
                          "run time for this model");
}

absl::StatusOr<LinearWeight> DecodeWeight(const RawTensor& weight, const RawTensor* scale) {
  const bool fp8 = weight.dtype == kFp8;
  if (!fp8 && !IsFloat(weight.dtype)) {
    return Wrong(weight, "dtype " + weight.dtype + " is not BF16, F16, F32 or F8_E4M3");
  }
  if (weight.shape.size() != 2) return Wrong(weight, "shape " + ShapeText(weight.shape));
  if (fp8 != (scale != nullptr)) {
    return Wrong(weight, fp8 ? "FP8 without weight_scale" : "a scale for a weight that is not FP8");
  }
  if (fp8) CRUMB_RETURN_IF_ERROR(CheckScale(weight, *scale));
  LinearWeight linear{.name = weight.name,
                      .dtype = weight.dtype,
                      .scale_dtype = fp8 ? scale->dtype : "",
                      .scales = 0,
                      .values = RowMajorF(weight.shape[0], weight.shape[1])};
  RowMajorF& values = linear.values;
  for (Eigen::Index i = 0; i < values.size(); ++i) {
    values.data()[i] = Load(weight.dtype, weight.bytes.data(), i);
  }
  if (fp8) {
    int64_t count = 1;
    for (const int64_t size : scale->shape) count *= size;
    linear.scales = count;
    for (Eigen::Index row = 0; row < values.rows(); ++row) {
      values.row(row) *= Load(scale->dtype, scale->bytes.data(), count == 1 ? 0 : row);
    }
  }
  if (!values.allFinite()) return Wrong(weight, "it holds a value that is not finite");
  return linear;
}

absl::StatusOr<EncodedWeight> EncodeWeight(const LinearWeight& weight) {
  const RowMajorF& values = weight.values;
  EncodedWeight encoded;
  bool saturated = false;
  Eigen::VectorXf scale = Eigen::VectorXf::Ones(values.rows());
  if (weight.scales > 0) {
    scale = values.rowwise().lpNorm<Eigen::Infinity>() / kernels::kFp8Max;
    if (weight.scales == 1) scale.setConstant(scale.maxCoeff());
    scale = scale.cwiseMax(kScaleMin);
    for (Eigen::Index i = 0; i < weight.scales; ++i) {
      Store(weight.scale_dtype, scale[i], encoded.scale, &saturated);
    }
    // Values are divided by the scale that readers will see.
    for (Eigen::Index row = 0; row < values.rows(); ++row) {
      scale[row] = Load(weight.scale_dtype, encoded.scale.data(), weight.scales == 1 ? 0 : row);
    }
  }
  for (Eigen::Index row = 0; row < values.rows(); ++row) {
    // A scale that its dtype rounded to 0 belongs to a row that is 0.
    const float inverse = scale[row] > 0 ? 1.0f / scale[row] : 0.0f;
    for (Eigen::Index i = 0; i < values.cols(); ++i) {
      Store(weight.dtype, values(row, i) * inverse, encoded.weight, &saturated);
    }
  }
  if (saturated) {
    return absl::InvalidArgumentError("tensor " + weight.name +
                                      ": rotated, it has values that F16 cannot hold");
  }
  return encoded;
}

namespace {

// Random inputs on which two paths are compared.
constexpr int kProbes = 16;

Eigen::MatrixXf RandomInputs(Eigen::Index rows) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  return Eigen::MatrixXf::NullaryExpr(rows, kProbes, [&] { return normal(random); });
}

// Returns the values of the inputs, [kv_heads * head_dim, kProbes].
Eigen::MatrixXf Values(const ValuePath& path, const Eigen::MatrixXf& inputs) {
  Eigen::MatrixXf values = path.v_weight * inputs;
  if (path.v_bias) values.colwise() += *path.v_bias;
  return values;
}

}  // namespace

void AbsorbRotation(const std::vector<Eigen::MatrixXf>& rotations,
                    const std::vector<Eigen::MatrixXf>& duals, ValuePath& path) {
  const Eigen::Index dim = rotations.front().rows();
  const auto kv_heads = static_cast<Eigen::Index>(rotations.size());
  const Eigen::Index q_heads = path.o_weight.cols() / dim;
  for (Eigen::Index head = 0; head < kv_heads; ++head) {
    const Eigen::MatrixXf transposed = rotations[head].transpose();
    path.v_weight.middleRows(head * dim, dim) =
        (transposed * path.v_weight.middleRows(head * dim, dim)).eval();
    if (path.v_bias) {
      path.v_bias->segment(head * dim, dim) =
          (transposed * path.v_bias->segment(head * dim, dim)).eval();
    }
  }
  for (Eigen::Index head = 0; head < q_heads; ++head) {
    const Eigen::MatrixXf& dual = duals[head / (q_heads / kv_heads)];
    path.o_weight.middleCols(head * dim, dim) =
        (path.o_weight.middleCols(head * dim, dim) * dual).eval();
  }
}

double ProductError(const ValuePath& before, const ValuePath& after, int head_dim) {
  const Eigen::MatrixXf inputs = RandomInputs(before.v_weight.cols());
  const Eigen::MatrixXf values = Values(before, inputs), rotated = Values(after, inputs);
  const Eigen::Index q_heads = before.o_weight.cols() / head_dim;
  const Eigen::Index group = q_heads / (before.v_weight.rows() / head_dim);
  double most = 0.0;
  for (Eigen::Index head = 0; head < q_heads; ++head) {
    const Eigen::Index kv_row = head / group * head_dim, column = head * head_dim;
    const Eigen::MatrixXf expected =
        before.o_weight.middleCols(column, head_dim) * values.middleRows(kv_row, head_dim);
    const Eigen::MatrixXf got =
        after.o_weight.middleCols(column, head_dim) * rotated.middleRows(kv_row, head_dim);
    most = std::max(most, static_cast<double>((got - expected).norm()) /
                              std::max(static_cast<double>(expected.norm()), 1e-30));
  }
  return most;
}

absl::StatusOr<RotationFile> AbsorbedRotationFile(const RotationFile& file) {
  if (file.rotation_v.empty()) {
    return absl::InvalidArgumentError(
        file.v_basis == "model" ? "the file does not rotate V, so there is nothing to absorb"
                                : "the file's R_V is absorbed already");
  }
  RotationFile absorbed = file;
  const int64_t dim = file.head_dim;
  for (int64_t head = 0; head < static_cast<int64_t>(file.mean_v.size()) / dim; ++head) {
    const Eigen::Map<const RowMajorF> rotation(&file.rotation_v[head * dim * dim], dim, dim);
    const Eigen::Map<const Eigen::VectorXf> mean(&file.mean_v[head * dim], dim);
    Eigen::Map<Eigen::VectorXf>(&absorbed.mean_v[head * dim], dim) =
        (rotation.cast<double>().transpose() * mean.cast<double>()).cast<float>();
  }
  absorbed.rotation_v.clear();
  // The expected error is a ratio of norms in the model's basis, which only a rotation preserves.
  if (!file.dual_v.empty()) absorbed.attention_error.clear();
  absorbed.dual_v.clear();
  absorbed.covariance_v.clear();
  absorbed.v_basis = "rotated";
  return absorbed;
}

}  // namespace crumb::calibration
