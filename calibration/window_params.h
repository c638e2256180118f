// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "calibration/activation_source.h"
#include "common/rotation_file.h"
#include "kernels/quantize.h"

namespace crumb::calibration {

inline constexpr int kPageTokens = 64;
inline constexpr int kSinkTokens = 64;
inline constexpr int kRecentTokens = 256;  // least length of the window behind history
// The shortest sequence from position 0 with a query that attends quantized history.
inline constexpr int kMeasuredTokens = kSinkTokens + kPageTokens + kRecentTokens;

// History pages that lie in a sequence as a whole and that queries of it attend: [first, end).
struct PageRange {
  int first = 0;
  int end = 0;

  int size() const { return end > first ? end - first : 0; }
};

// History pages before the one that a query at `position` finds in the recent window.
int PagesBefore(int position);
PageRange PagesOf(const SequenceActivations& sequence);
// Where page `page` begins in the sequence.
int RowOfPage(const SequenceActivations& sequence, int page);

// Windows of one (layer, KV head) of a model as workers store them with a rotation file, whose
// arrays are in the model's basis. Owns one tile. Not thread-safe.
class WindowParams {
 public:
  // `shape` and `file` are borrowed; the file has everything of this layer but shifts.
  WindowParams(const ModelShape& shape, const RotationFile& file, int layer, int kv_head);
  WindowParams(const WindowParams&) = delete;
  WindowParams& operator=(const WindowParams&) = delete;

  // The page of a sequence that lies in it as a whole, written to the tile. Until the next call.
  const kernels::QuantizeParams& Store(const SequenceActivations& sequence, int page);

 private:
  const float* HeadOf(const std::vector<float>& values, size_t item) const;
  void SetMean(const float* mean, const float* rotation, std::vector<float>& rotated) const;

  const ModelShape& shape_;
  const RotationFile& file_;
  const int kv_head_;
  const size_t file_head_;  // among all heads of the file
  std::vector<std::byte> tile_;
  std::vector<float> mean_k_, mean_v_;  // rotated
  kernels::QuantizeParams params_;
};

}  // namespace crumb::calibration
