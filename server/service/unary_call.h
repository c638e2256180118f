// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpc/grpc.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/call_scope.h"
#include "server/service/stall_watch.h"
#include "server/service/streams.h"

namespace crumb::server {

// Keeps gRPC's call in memory, so that another thread than the call's can cancel it at any time.
// TryCancel() of the call's context may not be used for this: the context goes with the call.
class CallHold {
 public:
  explicit CallHold(grpc::CallbackServerContext& call) : call_(call.c_call()) {
    ::grpc_call_ref(call_);
  }
  CallHold(const CallHold&) = delete;
  ~CallHold() { ::grpc_call_unref(call_); }

  // Does nothing once the call has ended. Thread-safe.
  void Cancel() { ::grpc_call_cancel(call_, /*reserved=*/nullptr); }

 private:
  grpc_call* const call_;
};

// A service with some of its methods raw: gRPC neither decodes their requests nor encodes their
// responses. `Methods` are templates such as WithRawCallbackMethod_Get.
template <typename Service, template <typename> typename... Methods>
struct WithRaw {
  using Type = Service;
};
template <typename Service, template <typename> typename First,
          template <typename> typename... Others>
struct WithRaw<Service, First, Others...> {
  using Type = First<typename WithRaw<Service, Others...>::Type>;
};

// The encoded messages of one unary call, which gRPC keeps until OnDone.
struct EncodedMessages {
  const grpc::ByteBuffer& request;
  grpc::ByteBuffer& response;
};

// One unary call from its arrival until gRPC is done with it, which is when the caller's flow
// control has let its response through, or the call was cancelled. Until then the call has its
// place in limits.requests_max, and a large response counts in limits.response_bytes_max: a caller
// that reads nothing uses up its own part of both. A response that is not read for
// limits.stream_progress_timeout is cancelled by StallWatch. Its states:
//
//   working --End--> waiting for the caller to read --OnDone--> gone
//                        |
//                        +--Stalled: the call is cancelled--> OnDone
//
// The request is decoded here and not by gRPC, which would do so before the caller is known, and
// would keep the message, which can take 25 times as much memory as its bytes, until OnDone.
//
// Keeps itself from Begin to OnDone. REQUIRES: Begin is called at first, and End once.
class UnaryCall : public grpc::ServerUnaryReactor,
                  public StallableStream,
                  public std::enable_shared_from_this<UnaryCall> {
 public:
  using Message = google::protobuf::Message;

  // REQUIRES: the objects that `context` refers to outlive this; `context` itself, `call` and the
  // encoded messages exist until OnDone.
  UnaryCall(const CallContext& context, const StreamParts& parts, Rpc rpc,
            grpc::CallbackServerContext& call, const EncodedMessages& encoded);

  void Begin() { self_ = shared_from_this(); }
  // Takes a place for the call, and room for its request, on behalf of the tenant; empty: none.
  absl::Status Admit(const std::string& tenant);
  // Decodes the request, whose fields may have any length. REQUIRES: Admit succeeded.
  absl::Status Decode();
  size_t request_bytes() const { return request_bytes_; }

  // Finishes the call, and frees its request. The object may be gone when this returns.
  void End(const absl::Status& status);

  void OnDone() override;
  void Stalled() override;

 protected:
  virtual Message& request_message() = 0;
  virtual Message& response_message() = 0;
  // The caller does not get the response, which is empty if this has been called before.
  virtual void Undelivered() {}

 private:
  void FreeRequest();
  // Counts and encodes the response. kResourceExhausted: it exceeds the budget, and was cleared.
  absl::Status EncodeResponse();

  ServerMetrics& metrics_;
  const Clock& clock_;
  const StreamParts parts_;
  grpc::CallbackServerContext& call_;
  const EncodedMessages encoded_;
  const size_t request_bytes_;
  CallHold hold_;
  std::unique_ptr<CallScope> scope_;
  std::string tenant_;
  uint64_t counted_bytes_ = 0;  // bytes counted in parts_.calls.response_bytes
  StallWatch::Place place_;
  std::shared_ptr<UnaryCall> self_;  // keeps the call alive from Begin to OnDone
};

// A UnaryCall with its messages.
template <typename Request, typename Response>
class UnaryCallOf : public UnaryCall {
 public:
  using UnaryCall::UnaryCall;

  // REQUIRES: Decode succeeded, and End was not called.
  const Request& request() const { return request_; }
  Response& response() { return response_; }

 protected:
  Message& request_message() final { return request_; }
  Message& response_message() final { return response_; }

 private:
  Request request_;
  Response response_;
};

}  // namespace crumb::server
