// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "common/mutex.h"
#include "common/thread.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/server.h"

namespace crumb::server {

// Keeps gRPC's callback threads awake. Each of them sleeps for 100 ms, whatever comes, once it has
// waited for a second in vain (CallbackAlternativeCQ, src/cpp/common/completion_queue_cc.cc of gRPC
// 1.51), and when all do, a request to a crumbd that was idle waits for as long. So a process that
// serves calls itself within its memory, twice a second: the thread that took the last one is not
// asleep. Needs the server's health service. Not thread-safe.
class CallbackWakes {
 public:
  // Starts the thread crumb-wakes. `server` must outlive this.
  explicit CallbackWakes(grpc::Server& server);
  // Call before the server is shut down.
  ~CallbackWakes();

 private:
  void Run();
  // One call of the health service; blocks until it has ended.
  void Call();

  grpc::GenericStub stub_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::server
