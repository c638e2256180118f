// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/statusor.h"
#include "common/call_message.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "crumb/v1/call_socket.pb.h"
#include "server/calls/call_context.h"
#include "server/calls/call_scope.h"
#include "server/calls/staging_calls.h"
#include "server/session/call_plane.h"

namespace crumb::server {

// Serves Acquire, Reserve and Commit as SocketCalls over Unix sockets, each with one thread and two
// system calls and without gRPC. The calls have the semantics and bounds of those over gRPC. The
// daemon has two: one for Acquires, and one for Reserves and Commits, so that a copy delays no
// Acquire.
//
// One thread serves all sockets, which wake it. It never waits for one of them, and closes neither
// sockets nor descriptors that messages carry (CallPlane::Open). Sockets are those of FdListener's
// connections, whose bounds apply. A Commit that this thread does not copy is copied by a commit
// thread, which sends the response; an Acquire that waits for a lower tier or another node ends on
// the thread that delivers the pages. Thread-safe.
//
// The life of a call: the thread receives a message (Serve), takes a place for it (CallScope) and
// begins it; the call's end (End), on any thread, sends the response without blocking. A process
// that does not read its responses loses its socket, and the call's leases or memory are taken back
// (Withdraw).
class CallSockets final : public CallPlane {
 public:
  struct Options {
    // Name of the thread.
    std::string thread = "crumb-calls";
    size_t response_bytes_max = kCallMessageBytesMax;  // a longer response has no fragments
    // A small Commit is copied by this thread, if no other socket waits for it. For sockets that
    // carry no Acquires.
    bool copies = false;
  };

  // REQUIRES: the parts that `context` refers to outlive this.
  static absl::StatusOr<std::unique_ptr<CallSockets>> Start(const CallContext& context,
                                                            Options options);
  ~CallSockets() override { Stop(); }

  // Begins no call any more, waits for those in progress, and closes the sockets. Idempotent.
  void Stop();

  absl::StatusOr<Opened> Open(std::shared_ptr<Session> session, std::shared_ptr<OwnerTasks> closing,
                              std::string owner) override;
  void Close(uint64_t number) override;

 private:
  struct Socket;
  struct Call;

  CallSockets(const CallContext& context, Options options)
      : context_(context),
        options_(std::move(options)),
        calls_(context.limits, context.part_max_percent) {}
  // Makes the epoll instance and the eventfd that wakes the thread to stop.
  absl::Status OpenEpoll();
  // Has epoll report messages of `fd` as events with `number`.
  absl::Status Watch(int fd, uint64_t number);
  // The thread.
  void Run();
  std::shared_ptr<Socket> Find(uint64_t number) const;  // null: there is none
  // Begins the call of a message. Returns false if the message is no SocketCall with a number: the
  // socket is then closed. Errors of the call itself go into its response.
  bool Serve(const std::shared_ptr<Socket>& socket, CommitHere here, std::span<const char> message);
  // Sends the response. Called once for each call that Serve began, on any thread.
  void End(Call& call, const absl::Status& status);
  // Releases the leases or memory that the call was granted, because its process gets no response.
  void Withdraw(Call& call);

  const CallContext context_;
  const Options options_;
  CallsInProgress calls_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::atomic<bool> stopping_{false};

  mutable Mutex mutex_;
  CondVar idle_;
  // Calls that began and have not ended; Stop waits until there are none.
  int64_t open_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;  // 0 wakes the thread
  std::unordered_map<uint64_t, std::shared_ptr<Socket>> sockets_ ABSL_GUARDED_BY(mutex_);

  Thread thread_;
};

}  // namespace crumb::server
