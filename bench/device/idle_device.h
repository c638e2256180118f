// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "client/device/device.h"

namespace crumb::bench {

// A device that does nothing, at once: memory is reserved and not touched, copies and kernels are
// accepted and not made. What a worker takes over it is the host's work alone, on any machine. Idle
// devices of other ordinals are its peers.
std::unique_ptr<client::Device> OpenIdleDevice(int ordinal = 0);

}  // namespace crumb::bench
