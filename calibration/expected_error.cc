// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/expected_error.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "calibration/head_moments.h"
#include "calibration/window_params.h"
#include "common/status_macros.h"
#include "kernels/window_error.h"

namespace crumb::calibration {
namespace {

constexpr int kWindowsMax = 16;  // of one sequence
constexpr int kQueryTokens = 4;  // that a worker holds

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
    const Eigen::MatrixXf rows = columns.transpose();  // column-major: one query after the other
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
  const int merged = shape_.kv_heads / file_.kv_heads;  // model heads of one of the file's
  std::vector<float> errors;
  for (size_t at = 0; at < sum_.size(); at += merged) {
    double error = 0.0;
    for (int i = 0; i < merged; ++i) error += sum_[at + i] / static_cast<double>(count_[at + i]);
    errors.push_back(static_cast<float>(error / merged));
  }
  return errors;
}

}  // namespace crumb::calibration
