// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"
#include "crumb/worker_options.h"
#include "kernels/cuda/decode/decode_call.h"

namespace crumb::client {

// DecodePlans holds the plans of one decode shape in device memory. A plan leaves out the pages in
// front of a layer's sliding window, so there is one for each window that the rank's layers have.
// Every step computes all of them.
//
// A plan says which warps of the decode kernel process which pages of which sequence; it is
// computed on the device from the lengths of the step, so that a captured graph needs no new
// parameters. Plans are in device memory that this object owns.
class DecodePlans {
 public:
  // `device` is borrowed.
  static absl::StatusOr<DecodePlans> Create(Device& device, const WorkerOptions& options,
                                            const kernels::cuda::DecodeShape& shape);
  DecodePlans() = default;

  // Enqueues the computation of the plans of a step.
  absl::Status Enqueue(Device& device, const kernels::cuda::DecodeLengths& lengths,
                       DeviceStream stream) const;

  // Returns the device address of the plan of layers with this window. REQUIRES: a layer has it.
  const void* Of(int window) const;

  // Returns the device memory that all plans take, in bytes.
  size_t bytes() const { return bytes_; }

 private:
  // The plan of layers with one sliding window; 0: none.
  struct Plan {
    int window = 0;
    DeviceBuffer memory;
  };

  kernels::cuda::DecodeShape shape_;
  size_t bytes_ = 0;
  std::vector<Plan> plans_;
};

}  // namespace crumb::client
