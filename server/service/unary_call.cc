// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/unary_call.h"

#include "common/status_macros.h"
#include "grpcpp/support/proto_buffer_writer.h"
#include "server/service/decode.h"
#include "server/service/grpc_status.h"

namespace crumb::server {
namespace {

// Responses up to this size are bounded by limits.requests_max alone. No call that changes
// something, such as a Reserve or Commit of 4,096 fragments, has a longer one, so that none of them
// loses its response to the budget of bytes.
constexpr uint64_t kSmallResponseBytes = 32 << 10;

// Bytes of a response that are encoded one after the other.
constexpr int kBlockBytes = 1 << 20;

// Empties the message and frees its memory, most of which Clear() would keep.
void Free(google::protobuf::Message& message) {
  const std::unique_ptr<google::protobuf::Message> empty(message.New());
  message.GetReflection()->Swap(&message, empty.get());
}

}  // namespace

UnaryCall::UnaryCall(const CallContext& context, const StreamParts& parts, Rpc rpc,
                     grpc::CallbackServerContext& call, const EncodedMessages& encoded)
    : metrics_(context.metrics),
      clock_(context.clock),
      parts_(parts),
      call_(call),
      encoded_(encoded),
      request_bytes_(encoded.request.Valid() ? encoded.request.Length() : 0),
      hold_(call),
      scope_(std::make_unique<CallScope>(context, parts.calls, rpc)) {}

absl::Status UnaryCall::Admit(const std::string& tenant) {
  tenant_ = tenant;
  return scope_->Admit(tenant, CountedBytes(request_bytes_));
}

absl::Status UnaryCall::Decode() {
  CRUMB_RETURN_IF_ERROR(server::Decode(encoded_.request, request_message()));
  const uint64_t counted = CountedMemory(request_message(), request_bytes_);
  return counted == 0 ? absl::OkStatus() : scope_->CountRequest(tenant_, counted);
}

void UnaryCall::FreeRequest() {
  FreeBytes(encoded_.request);
  Free(request_message());
  scope_->EndRequest();
}

absl::Status UnaryCall::EncodeResponse() {
  Message& response = response_message();
  const uint64_t bytes = response.ByteSizeLong();
  if (bytes > kSmallResponseBytes) {
    TenantBudget& budget = parts_.calls.response_bytes;
    const TenantBudget::Taken taken = budget.Take(tenant_, bytes);
    if (taken != TenantBudget::Taken::kYes) {
      metrics_.Reject(Rejection::kResponses, taken);
      Undelivered();
      Free(response);
      return TenantBudget::Error(taken, "limits.response_bytes_max");
    }
    counted_bytes_ = bytes;
  }
  grpc::ProtoBufferWriter writer(&encoded_.response, kBlockBytes, static_cast<int>(bytes));
  response.SerializeToZeroCopyStream(&writer);
  return absl::OkStatus();
}

void UnaryCall::End(const absl::Status& status) {
  FreeRequest();
  const absl::Status sent = status.ok() ? EncodeResponse() : status;
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
