// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/window_params.h"

#include <Eigen/Dense>
#include <algorithm>

namespace crumb::calibration {
namespace {

constexpr int kGroupSizeMax = 128;
constexpr size_t kTileAlignment = 128;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixView = Eigen::Map<const RowMajor>;

}  // namespace

int PagesBefore(int position) {
  return std::max(0, position + 1 - kSinkTokens - kRecentTokens) / kPageTokens;
}

PageRange PagesOf(const SequenceActivations& sequence) {
  const int first = sequence.first_position;
  return {.first = std::max(0, first - kSinkTokens + kPageTokens - 1) / kPageTokens,
          .end = PagesBefore(first + sequence.tokens - 1)};
}

int RowOfPage(const SequenceActivations& sequence, int page) {
  return kSinkTokens + page * kPageTokens - sequence.first_position;
}

WindowParams::WindowParams(const ModelShape& shape, const RotationFile& file, int layer,
                           int kv_head)
    : shape_(shape),
      file_(file),
      kv_head_(kv_head),
      file_head_(size_t{1} * layer * file.kv_heads + (file.kv_heads == 1 ? 0 : kv_head)),
      mean_k_(shape.head_dim),
      mean_v_(shape.head_dim) {
  const size_t dim = shape.head_dim;
  params_.shape = {.tokens = kPageTokens,
                   .head_dim = shape.head_dim,
                   .group_size = std::min(shape.head_dim, kGroupSizeMax)};
  params_.method = *kernels::MethodNamed(file.method);
  params_.k_stride = params_.v_stride = shape.kv_heads * shape.head_dim;
  params_.k_transform = {.rotation = HeadOf(file.rotation_k, dim * dim),
                         .mean = file.mean_k.empty() ? nullptr : mean_k_.data(),
                         .clip = file.clip_k,
                         .feedback = HeadOf(file.feedback_k, dim * dim)};
  params_.v_transform = {.rotation = HeadOf(file.rotation_v, dim * dim),
                         .mean = file.mean_v.empty() ? nullptr : mean_v_.data(),
                         .clip = file.clip_v,
                         .feedback = HeadOf(file.feedback_v, dim * dim)};
  SetMean(HeadOf(file.mean_v, dim), params_.v_transform.rotation, mean_v_);
  tile_.resize(params_.shape.int2_bytes() + kTileAlignment);
  const auto begin = reinterpret_cast<uintptr_t>(tile_.data());
  params_.tile =
      reinterpret_cast<uint8_t*>((begin + kTileAlignment - 1) / kTileAlignment * kTileAlignment);
}

const float* WindowParams::HeadOf(const std::vector<float>& values, size_t item) const {
  return values.empty() ? nullptr : &values[file_head_ * item];
}

void WindowParams::SetMean(const float* mean, const float* rotation,
                           std::vector<float>& rotated) const {
  if (mean == nullptr) return;
  const int dim = shape_.head_dim;
  Eigen::Map<RowMajor>(rotated.data(), 1, dim) =
      MatrixView(mean, 1, dim) * MatrixView(rotation, dim, dim);
}

const kernels::QuantizeParams& WindowParams::Store(const SequenceActivations& sequence, int page) {
  const size_t dim = shape_.head_dim;
  if (params_.k_transform.mean != nullptr) {
    const int block = std::min(page / file_.pages_per_position_block, file_.position_blocks - 1);
    SetMean(HeadOf(file_.mean_k, file_.position_blocks * dim) + block * dim,
            params_.k_transform.rotation, mean_k_);
  }
  const size_t row = size_t{1} * RowOfPage(sequence, page) * shape_.kv_heads + kv_head_;
  params_.k = sequence.k + row * dim;
  params_.v = sequence.v + row * dim;
  kernels::QuantizeTile(params_);
  return params_;
}

}  // namespace crumb::calibration
