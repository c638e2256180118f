// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "calibration/activation_source.h"
#include "common/rotation_file.h"

namespace crumb::calibration {

// The attention error that a worker's quality watch will see of a rotation file: that of
// kernels::MeasureWindow, on calibration windows, for queries as far behind them as they are when a
// window is evicted in decode.
class ExpectedError {
 public:
  // `file` has everything of the layers that are added but shifts, and is borrowed.
  ExpectedError(const ModelShape& shape, const RotationFile& file);

  // Adds windows of one KV head of one sequence, at most 16, evenly spread. Different heads may be
  // added at the same time.
  absl::Status Add(const SequenceActivations& sequence, int kv_head);

  // Windows of the layer that has the fewest, each of all its KV heads.
  int64_t windows() const;

  // Mean over windows, [layers, file.kv_heads]; empty where a layer has fewer than `windows_min`.
  std::vector<float> Errors(int64_t windows_min) const;

 private:
  const ModelShape& shape_;
  const RotationFile& file_;
  std::vector<double> sum_;  // [layers, kv_heads] of the model
  std::vector<int64_t> count_;
};

}  // namespace crumb::calibration
