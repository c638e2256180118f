// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/outgoing_calls.h"

namespace crumb::server {

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::chrono::system_clock::time_point ToGrpcDeadline(TimePoint deadline, TimePoint now) {
  constexpr Duration kMost = std::chrono::hours(24);  // far deadlines would overflow the sum
  const Duration left = deadline > now + kMost ? kMost : deadline - now;
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(left);
}

bool OutgoingCalls::Add(grpc::ClientContext* call) {
  MutexLock lock(&mutex_);
  if (stopped_) return false;
  calls_.insert(call);
  return true;
}

void OutgoingCalls::Remove(grpc::ClientContext* call) {
  MutexLock lock(&mutex_);
  calls_.erase(call);
  none_.NotifyAll();
}

void OutgoingCalls::Stop() {
  MutexLock lock(&mutex_);
  stopped_ = true;
  for (grpc::ClientContext* call : calls_) call->TryCancel();
  while (!calls_.empty()) none_.Wait(&mutex_);
}

}  // namespace crumb::server
