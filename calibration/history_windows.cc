// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/history_windows.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <span>

#include "calibration/head_moments.h"
#include "common/status_macros.h"
#include "kernels/quantize.h"
#include "kernels/window_error.h"

namespace crumb::calibration {
namespace {

// Channels per quantization group at most (docs/formats/page-tile.md).
constexpr int kGroupSizeMax = 128;

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
                         .feedback = HeadOf(file.feedback_k, dim * dim),
                         .dual = HeadOf(file.dual_k, dim * dim)};
  params_.v_transform = {.rotation = HeadOf(file.rotation_v, dim * dim),
                         .mean = file.mean_v.empty() ? nullptr : mean_v_.data(),
                         .clip = file.clip_v,
                         .feedback = HeadOf(file.feedback_v, dim * dim),
                         .dual = HeadOf(file.dual_v, dim * dim)};
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

namespace {

// Windows of one sequence whose error is measured at most; more would not change the mean.
constexpr int kWindowsMax = 16;
// Tokens whose queries a worker keeps for its quality watch.
constexpr int kQueryTokens = 4;

}  // namespace

ExpectedError::ExpectedError(const ModelShape& shape, const RotationFile& file)
    : shape_(shape),
      file_(file),
      sum_(static_cast<size_t>(shape.layers) * shape.kv_heads, 0.0),
      count_(sum_.size(), 0) {}

absl::Status ExpectedError::Add(const SequenceActivations& sequence, int kv_head) {
  const PageRange pages = PagesOf(sequence);
  const int windows = std::min(kWindowsMax, pages.size());
  if (windows == 0) return absl::OkStatus();
  const size_t at = static_cast<size_t>(sequence.layer) * shape_.kv_heads + kv_head;
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  WindowParams params(shape_, file_, sequence.layer, kv_head);
  for (int i = 0; i < windows; ++i) {
    const int page = pages.first + static_cast<int>(int64_t{i} * pages.size() / windows);
    const int queries_end = RowOfPage(sequence, page) + kPageTokens + kRecentTokens;
    CRUMB_ASSIGN_OR_RETURN(
        const Eigen::MatrixXf columns,
        QueryRows(shape_, sequence, kv_head, queries_end - kQueryTokens, kQueryTokens));
    const Eigen::MatrixXf rows = columns.transpose();  // column-major: query by query
    const std::span<const float> queries(rows.data(), rows.size());
    sum_[at] +=
        kernels::MeasureWindow(params.Store(sequence, page), queries, scale, 0.0f).attention;
    ++count_[at];
  }
  return absl::OkStatus();
}

int64_t ExpectedError::windows() const { return *std::min_element(count_.begin(), count_.end()); }

std::vector<float> ExpectedError::Errors(int64_t windows_min) const {
  if (windows() < windows_min) return {};
  const int merged = shape_.kv_heads / file_.kv_heads;  // heads of the model per head of the file
  std::vector<float> errors;
  for (size_t at = 0; at < sum_.size(); at += merged) {
    double error = 0.0;
    for (int i = 0; i < merged; ++i) error += sum_[at + i] / static_cast<double>(count_[at + i]);
    errors.push_back(static_cast<float>(error / merged));
  }
  return errors;
}

namespace {

// Every kQueryStep-th token of a sequence is a query of the mass shift, kQueriesMax at most.
constexpr int kQueryStep = 16;
constexpr int kQueriesMax = 256;

double LogSumExp(const Eigen::Ref<const Eigen::RowVectorXf>& logits) {
  const double most = logits.maxCoeff();
  return most + std::log((logits.cast<double>().array() - most).exp().sum());
}

// Returns the keys of history pages with quantization error, in the model's basis.
RowMajor QuantizedKeys(const ModelShape& shape, const RotationFile& file,
                       const SequenceActivations& sequence, int kv_head, const PageRange& pages) {
  WindowParams params(shape, file, sequence.layer, kv_head);
  RowMajor keys(pages.size() * kPageTokens, shape.head_dim);
  for (int page = pages.first; page < pages.end; ++page) {
    const kernels::QuantizeParams& window = params.Store(sequence, page);
    kernels::DequantizeTileToModel(window.shape, window.tile, window.k_transform, {},
                                   keys.row((page - pages.first) * kPageTokens).data(), nullptr);
  }
  return keys;
}

}  // namespace

MassShift::MassShift(const ModelShape& shape, const RotationFile& file)
    : shape_(shape),
      file_(file),
      sum_(static_cast<size_t>(shape.layers) * shape.q_heads, 0.0),
      count_(sum_.size(), 0) {}

absl::Status MassShift::Add(const SequenceActivations& sequence, int kv_head) {
  const PageRange pages = PagesOf(sequence);
  if (pages.size() == 0) return absl::OkStatus();
  const int group = shape_.q_heads / shape_.kv_heads;
  CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf exact,
                         KeyRows(shape_, sequence, kv_head, RowOfPage(sequence, pages.first),
                                 pages.size() * kPageTokens));
  const RowMajor quantized = QuantizedKeys(shape_, file_, sequence, kv_head, pages);
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  const int step = std::max(kQueryStep, sequence.tokens / kQueriesMax);
  for (int t = step - 1; t < sequence.tokens; t += step) {
    const int tokens = (PagesBefore(sequence.first_position + t) - pages.first) * kPageTokens;
    if (tokens <= 0) continue;
    CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf q, QueryRows(shape_, sequence, kv_head, t, 1));
    const Eigen::MatrixXf rows = q * scale;
    const RowMajor with = rows * quantized.topRows(tokens).transpose();
    const RowMajor without = rows * exact.topRows(tokens).transpose();
    for (int g = 0; g < group; ++g) {
      const size_t at = static_cast<size_t>(sequence.layer) * shape_.q_heads + kv_head * group + g;
      sum_[at] += LogSumExp(with.row(g)) - LogSumExp(without.row(g));
      ++count_[at];
    }
  }
  return absl::OkStatus();
}

std::vector<float> MassShift::Shifts() const {
  std::vector<float> shifts;
  for (size_t i = 0; i < sum_.size(); ++i) {
    shifts.push_back(count_[i] == 0 ? 0.0f
                                    : static_cast<float>(sum_[i] / static_cast<double>(count_[i])));
  }
  return shifts;
}

}  // namespace crumb::calibration
