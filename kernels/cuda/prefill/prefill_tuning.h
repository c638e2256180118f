// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crumb::kernels::cuda {

// The tensor core instructions of prefill attention, for tests and benchmarks that compare them.
// kAuto: wgmma if the device, the build and the call allow it, else mma.sync. kWarp: mma.sync on
// every device.
enum class PrefillMma : uint8_t { kAuto, kWarp };

}  // namespace crumb::kernels::cuda
