// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/grpc_log.h"

#include <atomic>
#include <string_view>

#include "common/clock.h"
#include "common/logging.h"
#include "grpc/support/log.h"

namespace crumb::server {
namespace {

// As gRPC 1.51 says it, at either end.
constexpr std::string_view kHandshakeFailed = "Handshake failed with fatal error";
constexpr Duration kBetweenLines = std::chrono::seconds(1);

std::atomic<uint64_t> handshake_failures{0};
std::atomic<int64_t> quiet_until_ns{0};
std::atomic<uint64_t> unlogged{0};

// Any process that reaches the port can cause lines: no more than one in a while is written.
void Line(gpr_log_func_args* line) {
  const std::string_view text = line->message;
  if (text.find(kHandshakeFailed) != std::string_view::npos) handshake_failures.fetch_add(1);
  const int64_t now = Clock::Real().Now().time_since_epoch() / std::chrono::nanoseconds(1);
  int64_t until = quiet_until_ns.load();
  const int64_t next = now + kBetweenLines / std::chrono::nanoseconds(1);
  if (now < until || !quiet_until_ns.compare_exchange_strong(until, next)) {
    unlogged.fetch_add(1);
    return;
  }
  LogWarning("grpc: {} ({} lines before it were left out)", text, unlogged.exchange(0));
}

}  // namespace

void TakeGrpcLog() { gpr_set_log_function(&Line); }

uint64_t TlsHandshakeFailures() { return handshake_failures.load(); }

}  // namespace crumb::server
