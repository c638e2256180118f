// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/mass_shift.h"

#include <algorithm>
#include <cmath>

#include "calibration/head_moments.h"
#include "calibration/window_params.h"
#include "common/status_macros.h"
#include "kernels/quantize.h"

namespace crumb::calibration {
namespace {

constexpr int kQueryStep = 16;
constexpr int kQueriesMax = 256;  // of one sequence

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

double LogSumExp(const Eigen::Ref<const Eigen::RowVectorXf>& logits) {
  const double most = logits.maxCoeff();
  return most + std::log((logits.cast<double>().array() - most).exp().sum());
}

// The keys of history pages as attention over tiles sees them, in the model's basis.
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
