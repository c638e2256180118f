// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/call_metadata.h"

#include <chrono>
#include <string_view>

#include "common/hex.h"

namespace crumb::server {
namespace {

// The way back over a local socket.
constexpr auto kAnswerMargin = std::chrono::milliseconds(1);

}  // namespace

absl::StatusOr<std::shared_ptr<Session>> SessionOf(const grpc::CallbackServerContext& call,
                                                   const SessionTable& sessions) {
  const auto found = call.client_metadata().find(kSessionMetadata);
  RandomId token;
  if (found == call.client_metadata().end() ||
      !HexDecode(std::string_view(found->second.data(), found->second.size()), token.bytes)) {
    return absl::UnauthenticatedError("metadata crumb-session must hold 32 hexadecimal digits");
  }
  auto session = sessions.Find(token.view());
  if (session == nullptr) {
    return absl::UnauthenticatedError("unknown session: it ended, or crumbd was restarted");
  }
  return session;
}

TimePoint DeadlineOf(const grpc::CallbackServerContext& call, TimePoint now) {
  const auto deadline = call.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return TimePoint::max();
  const auto left = deadline - std::chrono::system_clock::now() - kAnswerMargin;
  // Far deadlines would overflow the sum.
  if (left > std::chrono::hours(24)) return TimePoint::max();
  return now + std::chrono::duration_cast<Duration>(left);
}

}  // namespace crumb::server
