// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/mass_shift.h"

#include <algorithm>
#include <cmath>

#include "calibration/head_moments.h"
#include "common/status_macros.h"
#include "kernels/quantize.h"

namespace crumb::calibration {
namespace {

constexpr int kPageTokens = 64;
constexpr int kSinkTokens = 64;
constexpr int kRecentTokens = 256;  // least length of the window behind history
constexpr int kQueryStep = 16;
constexpr int kQueriesMax = 256;  // of one sequence
constexpr int kGroupSizeMax = 128;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixView = Eigen::Map<const RowMajor>;

// History pages before the one that a query at `position` finds in the recent window.
int PagesBefore(int position) {
  return std::max(0, position + 1 - kSinkTokens - kRecentTokens) / kPageTokens;
}

// The first history page that lies in the sequence as a whole.
int FirstPage(int first_position) {
  return std::max(0, first_position - kSinkTokens + kPageTokens - 1) / kPageTokens;
}

// Where page `page` begins in the sequence.
int RowOfPage(const SequenceActivations& sequence, int page) {
  return kSinkTokens + page * kPageTokens - sequence.first_position;
}

double LogSumExp(const Eigen::Ref<const Eigen::RowVectorXf>& logits) {
  const double most = logits.maxCoeff();
  return most + std::log((logits.cast<double>().array() - most).exp().sum());
}

// The keys of history pages [first, end) as attention over tiles sees them, in the model's basis.
RowMajor QuantizedKeys(const ModelShape& shape, const RotationFile& file,
                       const SequenceActivations& sequence, int kv_head, int first, int end) {
  const int64_t dim = shape.head_dim;
  const int64_t head = int64_t{sequence.layer} * file.kv_heads + kv_head;
  const MatrixView rotation(&file.rotation_k[head * dim * dim], dim, dim);
  kernels::QuantizeParams params;
  params.shape = {.tokens = kPageTokens,
                  .head_dim = shape.head_dim,
                  .group_size = std::min(shape.head_dim, kGroupSizeMax)};
  params.method = kernels::Method::kCrumb;
  params.k_stride = params.v_stride = shape.kv_heads * dim;
  params.k_transform = {.rotation = rotation.data(),
                        .clip = file.clip_k,
                        .feedback = &file.feedback_k[head * dim * dim]};
  std::vector<std::byte> storage(params.shape.int2_bytes() + 128);
  params.tile =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(storage.data()) + 127) / 128 * 128);
  RowMajor keys((end - first) * kPageTokens, dim);
  for (int page = first; page < end; ++page) {
    const int block = std::min(page / file.pages_per_position_block, file.position_blocks - 1);
    const MatrixView mean(&file.mean_k[(head * file.position_blocks + block) * dim], 1, dim);
    const RowMajor rotated = mean * rotation;
    params.k_transform.mean = rotated.data();
    params.k = sequence.k + (int64_t{RowOfPage(sequence, page)} * shape.kv_heads + kv_head) * dim;
    params.v = params.k;  // only the keys of the tile are read
    kernels::QuantizeTile(params);
    kernels::DequantizeTileToModel(params.shape, params.tile, params.k_transform, {},
                                   keys.row((page - first) * kPageTokens).data(), nullptr);
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
  const int first = FirstPage(sequence.first_position);
  const int end = PagesBefore(sequence.first_position + sequence.tokens - 1);
  if (end <= first) return absl::OkStatus();
  const int group = shape_.q_heads / shape_.kv_heads;
  CRUMB_ASSIGN_OR_RETURN(
      const Eigen::MatrixXf exact,
      KeyRows(shape_, sequence, kv_head, RowOfPage(sequence, first), (end - first) * kPageTokens));
  const RowMajor quantized = QuantizedKeys(shape_, file_, sequence, kv_head, first, end);
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  const int step = std::max(kQueryStep, sequence.tokens / kQueriesMax);
  for (int t = step - 1; t < sequence.tokens; t += step) {
    const int tokens = (PagesBefore(sequence.first_position + t) - first) * kPageTokens;
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
