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
// Keeps itself from Begin to OnDone. REQUIRES: Begin is called at first, and End once.
class UnaryCall : public grpc::ServerUnaryReactor,
                  public StallableStream,
                  public std::enable_shared_from_this<UnaryCall> {
 public:
  using Message = google::protobuf::Message;

  // REQUIRES: the objects that `context` refers to outlive this; `context` itself, `call` and
  // `response` exist until OnDone.
  UnaryCall(const CallContext& context, const StreamParts& parts, Rpc rpc,
            grpc::CallbackServerContext& call, Message& response);

  void Begin() { self_ = shared_from_this(); }
  CallScope& scope() { return *scope_; }
  // The tenant on whose behalf the call is made, for which its response is counted.
  void SetTenant(const std::string& tenant) { tenant_ = tenant; }

  // Finishes the call. The object may be gone when this returns.
  void End(const absl::Status& status);

  void OnDone() override;
  void Stalled() override;

 protected:
  // The caller does not get the response, which is empty if this has been called before.
  virtual void Undelivered() {}

 private:
  // Counts the response. kResourceExhausted: it exceeds the budget, and was cleared.
  absl::Status CountResponse();

  ServerMetrics& metrics_;
  const Clock& clock_;
  const StreamParts parts_;
  grpc::CallbackServerContext& call_;
  Message& response_;
  CallHold hold_;
  std::unique_ptr<CallScope> scope_;
  std::string tenant_;
  uint64_t counted_bytes_ = 0;  // bytes counted in parts_.calls.response_bytes
  StallWatch::Place place_;
  std::shared_ptr<UnaryCall> self_;  // keeps the call alive from Begin to OnDone
};

}  // namespace crumb::server
