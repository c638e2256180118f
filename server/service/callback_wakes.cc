// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/callback_wakes.h"

#include <chrono>

#include "common/clock.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/channel_arguments.h"
#include "grpcpp/support/slice.h"

namespace crumb::server {
namespace {

// Half of the time that a callback thread waits before it sleeps.
constexpr auto kInterval = std::chrono::milliseconds(500);

}  // namespace

CallbackWakes::CallbackWakes(grpc::Server& server)
    : stub_(server.InProcessChannel(grpc::ChannelArguments())),
      thread_("crumb-wakes", [this] { Run(); }) {}

CallbackWakes::~CallbackWakes() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.Join();
}

void CallbackWakes::Run() {
  while (true) {
    Call();
    const TimePoint next = Clock::Real().Now() + kInterval;
    MutexLock lock(&mutex_);
    while (!stopping_ && changed_.WaitUntil(&mutex_, next)) {
    }
    if (stopping_) return;
  }
}

void CallbackWakes::Call() {
  grpc::ClientContext context;
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer response;
  bool ended = false;
  stub_.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                  &response, [&](const grpc::Status&) {
                    MutexLock lock(&mutex_);
                    ended = true;
                    changed_.NotifyAll();
                  });
  MutexLock lock(&mutex_);
  while (!ended) changed_.Wait(&mutex_);
}

}  // namespace crumb::server
