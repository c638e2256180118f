// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace crumb {

// The largest message on a session's call socket (crumb/v1/call_socket.proto). It fits the buffers
// that Linux gives a Unix socket by default.
inline constexpr size_t kCallMessageBytesMax = 128 << 10;

}  // namespace crumb
