// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "common/clock.h"
#include "common/mutex.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "server/metrics/server_metrics.h"
#include "server/service/grpc_status.h"
#include "server/service/stall_watch.h"
#include "server/service/stream_registry.h"

namespace crumb::server {

// A server stream that writes messages as they come, one at a time, until its caller or the daemon
// ends it. `Reactor` is gRPC's reactor of the stream. Keeps itself alive from Begin to OnDone.
template <typename Reactor, typename Response>
class QueueStream : public Reactor,
                    public LongStream,
                    public std::enable_shared_from_this<QueueStream<Reactor, Response>> {
 public:
  // Writes the queued items. Thread-safe; does nothing after the stream has ended.
  void Wake() {
    std::optional<grpc::Status> end;
    {
      MutexLock lock(&mutex_);
      if (!begun_ || writing_ || finished_ || !MayEnd()) return;
      if (end_.has_value()) {
        finished_ = true;
        end = end_;
      } else if (Take(message_)) {
        writing_ = true;
      } else {
        return;
      }
    }
    // Only one thread gets here until the operation below has completed.
    if (end.has_value()) return this->Finish(*end);
    BeforeWrite();
    this->StartWrite(&message_);
  }

  void Stop(const absl::Status& why) override { End(ToGrpc(why)); }

  void OnWriteDone(bool ok) override {
    AfterWrite();
    {
      MutexLock lock(&mutex_);
      writing_ = false;
    }
    if (!ok) return End(grpc::Status::CANCELLED);
    Wake();
  }
  void OnCancel() override { End(grpc::Status::CANCELLED); }
  void OnDone() override {
    Ended();
    self_.reset();  // may delete this
  }

 protected:
  // Fills in the next message. Returns false if there is none now; Wake must follow when there is
  // one. Called under a lock, so it must not call this object.
  virtual bool Take(Response& message) = 0;
  // Called once, when gRPC has ended the stream; no other function of it is called afterwards.
  virtual void Ended() {}
  // Called before a message is written, and when the caller has taken it or the write has failed.
  // These calls alternate.
  virtual void BeforeWrite() {}
  virtual void AfterWrite() {}
  // Returns false if the stream may neither write nor end now; Wake() follows once this changes.
  virtual bool MayEnd() const { return true; }

  // Starts writing. REQUIRES: called once, when this is owned by a shared_ptr.
  void Begin() {
    self_ = this->shared_from_this();
    {
      MutexLock lock(&mutex_);
      begun_ = true;
    }
    Wake();
  }

  // Ends the stream after the write in progress. The first end counts.
  void End(const grpc::Status& status) {
    {
      MutexLock lock(&mutex_);
      if (!end_.has_value()) end_ = status;
    }
    Wake();
  }

 private:
  Mutex mutex_;
  // The stream's state: writes and ends begin only after Begin, one at a time, and none after the
  // end.
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  Response message_;  // belongs to the write in progress
  std::shared_ptr<QueueStream> self_;
};

// A QueueStream that ends when its caller does not read a message for longer than the StallWatch
// allows. While it has no message to write it waits for nothing, so a stream that is idle stays.
template <typename Reactor, typename Response>
class StallableQueueStream : public QueueStream<Reactor, Response>, public StallableStream {
 public:
  // A write that its caller does not read ends only with the call. The stream must not end before
  // TryCancel has returned, because the call's context would go with it.
  void Stalled() override {
    stalled_streams_.Add();
    call_.TryCancel();
    cancelled_.store(true);
    this->End(grpc::Status(grpc::StatusCode::CANCELLED, "limits.stream_progress_timeout"));
  }

 protected:
  // The arguments outlive the stream.
  StallableQueueStream(grpc::CallbackServerContext& call, const Clock& clock,
                       Counter& stalled_streams)
      : call_(call), clock_(clock), stalled_streams_(stalled_streams) {}

  void BeforeWrite() override { BeginWait(clock_.Now(), /*progressed=*/true); }
  void AfterWrite() override { EndWait(); }
  bool MayEnd() const override { return !stalled() || cancelled_.load(); }

 private:
  grpc::CallbackServerContext& call_;
  const Clock& clock_;
  Counter& stalled_streams_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace crumb::server
