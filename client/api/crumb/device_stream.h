// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crumb::client {

// An ordered queue of work on a device: a cudaStream_t, passed on as it is.
using DeviceStream = struct DeviceStreamHandle*;

}  // namespace crumb::client
