// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/decode_plans.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<DecodePlans> DecodePlans::Create(Device& device, const WorkerOptions& options,
                                                const kernels::cuda::DecodeShape& shape) {
  DecodePlans plans;
  plans.shape_ = shape;
  const size_t bytes = device.kernels().PlanBytes(shape);
  for (int layer = 0; layer < options.own_layers(); ++layer) {
    const int window = options.own_window(layer);
    if (std::ranges::find(plans.plans_, window, &Plan::window) != plans.plans_.end()) continue;
    CRUMB_ASSIGN_OR_RETURN(DeviceBuffer memory, NewDeviceBuffer(device, bytes));
    plans.plans_.push_back({window, std::move(memory)});
    plans.bytes_ += bytes;
  }
  return plans;
}

absl::Status DecodePlans::Enqueue(Device& device, const kernels::cuda::DecodeLengths& lengths,
                                  DeviceStream stream) const {
  for (const Plan& plan : plans_) {
    CRUMB_RETURN_IF_ERROR(device.kernels().Plan(
        shape_, lengths, plan.window, reinterpret_cast<void*>(plan.memory.get()), stream));
  }
  return absl::OkStatus();
}

const void* DecodePlans::Of(int window) const {
  const auto plan = std::ranges::find(plans_, window, &Plan::window);
  return reinterpret_cast<const void*>(plan->memory.get());
}

}  // namespace crumb::client
