// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace crumb {

// The largest message on a session's call socket (crumb/v1/call_socket.proto). It fits the buffers
// that Linux gives a Unix socket by default.
inline constexpr size_t kCallMessageBytesMax = 128 << 10;

// Fragments, and page keys, that a Reserve or Commit on a call socket may name. Larger ones go over
// gRPC: one thread of crumbd reads all call sockets, and this many take it about 100 us.
inline constexpr int kCallFragmentsMax = 256;

}  // namespace crumb
