// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "calibration/activation_source.h"
#include "common/rotation_file.h"

namespace crumb::calibration {

// How much the softmax mass of quantized history grows by the noise of its keys: per query head the
// mean over calibration queries of log-sum-exp over history of quantized minus exact logits, in
// nats, on the real tiles.
class MassShift {
 public:
  // `file` has everything but the shifts and is borrowed.
  MassShift(const ModelShape& shape, const RotationFile& file);

  // Adds every 16th query of one sequence whose history is not empty.
  absl::Status Add(const SequenceActivations& sequence);

  // [layers, q_heads]; 0 where no query was added.
  std::vector<float> Shifts() const;

 private:
  const ModelShape& shape_;
  const RotationFile& file_;
  std::vector<double> sum_;  // [layers, q_heads]
  std::vector<int64_t> count_;
};

}  // namespace crumb::calibration
