// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/unary_call.h"

#include "server/service/grpc_status.h"

namespace crumb::server {
namespace {

// Responses up to this size are bounded by limits.requests_max alone. No call that changes
// something, such as a Reserve or Commit of 4,096 fragments, has a longer one, so that none of them
// loses its response to the budget of bytes.
constexpr uint64_t kSmallResponseBytes = 32 << 10;

// Empties the message and frees its memory, most of which Clear() would keep.
void Free(google::protobuf::Message& message) {
  const std::unique_ptr<google::protobuf::Message> empty(message.New());
  message.GetReflection()->Swap(&message, empty.get());
}

}  // namespace

UnaryCall::UnaryCall(const CallContext& context, const StreamParts& parts, Rpc rpc,
                     grpc::CallbackServerContext& call, Message& response)
    : metrics_(context.metrics),
      clock_(context.clock),
      parts_(parts),
      call_(call),
      response_(response),
      hold_(call),
      scope_(std::make_unique<CallScope>(context, parts.calls, rpc)) {}

absl::Status UnaryCall::CountResponse() {
  const uint64_t bytes = response_.ByteSizeLong();
  if (bytes <= kSmallResponseBytes) return absl::OkStatus();
  TenantBudget& budget = parts_.calls.response_bytes;
  const TenantBudget::Taken taken = budget.Take(tenant_, bytes);
  if (taken == TenantBudget::Taken::kYes) {
    counted_bytes_ = bytes;
    return absl::OkStatus();
  }
  metrics_.Reject(Rejection::kResponses, taken);
  Undelivered();
  Free(response_);
  return TenantBudget::Error(taken, "limits.response_bytes_max");
}

void UnaryCall::End(const absl::Status& status) {
  const absl::Status sent = status.ok() ? CountResponse() : status;
  scope_->Observe(sent.code());
  BeginWait(clock_.Now(), /*progressed=*/true);
  place_ = parts_.stalls.Add(weak_from_this());
  Finish(ToGrpc(sent));
}

void UnaryCall::OnDone() {
  EndWait();
  parts_.stalls.Remove(place_);
  if (call_.IsCancelled()) Undelivered();
  if (counted_bytes_ > 0) parts_.calls.response_bytes.Give(tenant_, counted_bytes_);
  scope_.reset();
  self_.reset();  // may delete this
}

void UnaryCall::Stalled() {
  metrics_.stalled_streams.Add();
  hold_.Cancel();
}

}  // namespace crumb::server
