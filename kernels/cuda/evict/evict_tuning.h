// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/device_limits.h"

namespace crumb::kernels::cuda {

// The tensor core instructions that multiply rows by R. kAuto: wgmma if the device and the call
// allow it, else mma.sync. kWarp: mma.sync and no bulk copies, on every device.
enum class RotatePath : uint8_t { kAuto, kWarp };

// Choices that EvictWindows makes by itself, for tests that compare them.
struct EvictTuning {
  RotatePath path = RotatePath::kAuto;
  DeviceLimits limits = {};
};

}  // namespace crumb::kernels::cuda
