// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crumb::server {

// From now on what gRPC logs goes to our log, a line a second at most, and TLS handshakes that fail
// are counted: gRPC tells of them nowhere else. Of the whole process. Thread-safe, idempotent.
void TakeGrpcLog();

// Handshakes that failed since TakeGrpcLog, of callers and of connections to other nodes.
uint64_t TlsHandshakeFailures();

}  // namespace crumb::server
