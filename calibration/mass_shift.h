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
  // `file` has everything but the shifts, of the layers that are added, and is borrowed.
  MassShift(const ModelShape& shape, const RotationFile& file);

  // Adds queries of one KV head of one sequence whose history is not empty, every 16th but at most
  // 256. Different heads may be added at the same time.
  absl::Status Add(const SequenceActivations& sequence, int kv_head);

  // [layers, q_heads]; 0 where no query was added.
  std::vector<float> Shifts() const;

 private:
  const ModelShape& shape_;
  const RotationFile& file_;
  std::vector<double> sum_;  // [layers, q_heads]
  std::vector<int64_t> count_;
};

}  // namespace crumb::calibration
