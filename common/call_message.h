// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace crumb {

// Of one message on a session's call socket (crumb/v1/call_socket.proto): fits the buffers that
// Linux gives a Unix socket unasked.
inline constexpr size_t kCallMessageBytesMax = 128 << 10;

}  // namespace crumb
