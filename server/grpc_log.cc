// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/grpc_log.h"

#include <atomic>
#include <string_view>

#include "common/limited_log.h"
#include "grpc/support/log.h"

namespace crumb::server {
namespace {

// As gRPC 1.51 says it, at either end.
constexpr std::string_view kHandshakeFailed = "Handshake failed with fatal error";
std::atomic<uint64_t> handshake_failures{0};

// Callers can cause such lines.
void Line(gpr_log_func_args* line) {
  const std::string_view text = line->message;
  if (text.find(kHandshakeFailed) != std::string_view::npos) handshake_failures.fetch_add(1);
  LogWarningLimited("grpc: {}", text);
}

}  // namespace

void TakeGrpcLog() { gpr_set_log_function(&Line); }

uint64_t TlsHandshakeFailures() { return handshake_failures.load(); }

}  // namespace crumb::server
