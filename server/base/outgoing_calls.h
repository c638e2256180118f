// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/status.h"

namespace crumb::server {

// The least time between two attempts to connect to another server, which gRPC takes for the
// longest time that one may take, too.
inline constexpr int kConnectTimeoutMs = 3000;

// Returns the status with the same code and text; both libraries number the codes alike.
absl::Status FromGrpc(const grpc::Status& status);

// Returns `deadline`, of our monotonic clock, as a time of the wall clock, as gRPC wants it.
// Deadlines further than 24 hours from `now` become 24 hours.
std::chrono::system_clock::time_point ToGrpcDeadline(TimePoint deadline, TimePoint now);

// Calls to other servers that are under way, so that stopping need not wait for their deadlines. An
// object that makes calls owns one, shares it with them (StartCall), and stops it before it
// destroys the objects that callbacks use. Thread-safe.
class OutgoingCalls {
 public:
  ~OutgoingCalls() { Stop(); }

  // Notes a call that is about to begin. Returns false if Stop was called: the call must not begin.
  bool Add(grpc::ClientContext* call);
  // Notes that the call's callback has run. REQUIRES: Add returned true for it.
  void Remove(grpc::ClientContext* call);
  // Cancels all calls and waits for their callbacks. Later calls are refused. Idempotent. Must not
  // be called from a callback, which it would wait for.
  void Stop();

 private:
  Mutex mutex_;
  CondVar none_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<grpc::ClientContext*> calls_ ABSL_GUARDED_BY(mutex_);
};

// Starts one unary call. `start(context, request, response, callback)` is the stub's. `done` is
// called once: with kCancelled before this returns if `calls` was stopped, else on a thread of
// gRPC, with the response or the error. `done` must not block, and may use objects that outlive
// Stop of `calls`.
template <typename Response, typename Request, typename Starter>
void StartCall(const std::shared_ptr<OutgoingCalls>& calls, Request request,
               std::chrono::system_clock::time_point deadline, const Starter& start,
               std::function<void(absl::StatusOr<Response>)> done) {
  struct Call {
    grpc::ClientContext context;
    Request request;
    Response response;
  };
  auto call = std::make_shared<Call>();
  call->request = std::move(request);
  call->context.set_deadline(deadline);
  if (!calls->Add(&call->context)) return done(absl::CancelledError("crumbd is stopping"));
  start(&call->context, &call->request, &call->response,
        [calls, call, done = std::move(done)](const grpc::Status& status) {
          if (status.ok()) {
            done(std::move(call->response));
          } else {
            done(FromGrpc(status));
          }
          calls->Remove(&call->context);
        });
}

}  // namespace crumb::server
