// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"
#include "crumb/worker_options.h"
#include "kernels/cuda/evict/evict_call.h"

namespace crumb::client {

// DeviceConstants holds a rank's rotations, means, feedback, shifts and sink logits in device
// memory, in the layout that the kernels read. Immutable.
//
// Evict transforms (prepared rotations and feedback) are those of all layers together, because one
// launch evicts all layers of a window; the other arrays are passed layer by layer.
class DeviceConstants {
 public:
  // Blocks until all constants are copied. `device` is borrowed.
  static absl::StatusOr<std::unique_ptr<DeviceConstants>> Upload(Device& device,
                                                                 const WorkerOptions& options);

  // Device addresses of one layer's data, as in RotationSet::Layer; null means identity or zero.
  const float* dual_k(int layer) const { return At(Either(dual_k_, rotation_k_), layer); }
  const float* dual_v(int layer) const { return At(Either(dual_v_, rotation_v_), layer); }
  const float* mean_k_columns(int layer) const { return At(mean_k_columns_, layer); }
  const float* mean_v(int layer) const { return At(mean_v_, layer); }
  const float* shift(int layer) const { return At(shift_, layer); }
  const float* sink_logits(int layer) const { return At(sink_logits_, layer); }

  const kernels::cuda::EvictTransform& evict_k() const { return evict_k_; }
  const kernels::cuda::EvictTransform& evict_v() const { return evict_v_; }

 private:
  // [layers, elements]
  struct Array {
    DeviceBuffer memory;
    size_t elements = 0;
  };
  class Uploader;

  // Returns the device address of a layer's elements; null if the array is empty.
  static const float* At(const Array& array, int layer) {
    if (array.elements == 0) return nullptr;
    return reinterpret_cast<const float*>(array.memory.get()) + array.elements * layer;
  }

  static const Array& Either(const Array& first, const Array& second) {
    return first.elements != 0 ? first : second;
  }

  Array rotation_k_, rotation_v_, mean_k_columns_, mean_v_, shift_, sink_logits_;
  Array dual_k_, dual_v_;  // empty where the rotation is orthogonal
  Array rotated_mean_k_, spread_mean_v_;
  DeviceBuffer prepared_k_, prepared_v_, feedback_k_, feedback_v_;
  kernels::cuda::EvictTransform evict_k_, evict_v_;
};

}  // namespace crumb::client
