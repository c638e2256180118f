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

absl::Status FromGrpc(const grpc::Status& status);

// `deadline` of our clock as gRPC wants it.
std::chrono::system_clock::time_point ToGrpcDeadline(TimePoint deadline, TimePoint now);

// Calls to other nodes that are under way, so that stopping need not wait for their deadlines.
// Thread-safe.
class OutgoingCalls {
 public:
  ~OutgoingCalls() { Stop(); }

  // False: stopped; the call must not begin.
  bool Add(grpc::ClientContext* call);
  // The call's callback has run.
  void Remove(grpc::ClientContext* call);
  // Cancels all and waits for their callbacks. Not from a callback.
  void Stop();

 private:
  Mutex mutex_;
  CondVar none_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<grpc::ClientContext*> calls_ ABSL_GUARDED_BY(mutex_);
};

// Starts one unary call. `start(context, request, response, callback)` is the stub's.
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
