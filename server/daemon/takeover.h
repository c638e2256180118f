// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "common/unique_fd.h"
#include "server/daemon/options.h"
#include "storage/host_image.h"

// How one crumbd takes over from another of its user on its host: proto/crumb/v1/takeover.proto.
namespace crumb::server {

// Returns the path at which a crumbd with these options listens for its successor.
std::string TakeoverSocket(const Options& options);

// Waits for a successor on a thread of its own, crumb-takeover. A successor may have the memory if
// it is a process of the same user with the same SSD folder. The listener does not hand over
// itself: it wakes the main thread, which stops the daemon first.
//
//   predecessor  listens --request: Examine--> TakeSuccessor, Daemon::HandOver, HandMemoryOver
//   successor    TakeOver ----------------------------> memory --> serves --> ConfirmTakeover
class TakeoverListener {
 public:
  // `requested` is called once, on the thread, when a successor that may have the memory requests
  // it. kAlreadyExists: another crumbd listens at the socket.
  static absl::StatusOr<std::unique_ptr<TakeoverListener>> Start(const Options& options,
                                                                 std::function<void()> requested);
  // Ends the thread and removes the socket.
  ~TakeoverListener();

  // The connection to the successor that requested a takeover; invalid: none did.
  UniqueFd TakeSuccessor();

 private:
  TakeoverListener(const Options& options, std::function<void()> requested);

  void Run();
  // Receives the request of the process at `socket`. Returns why it may not have the memory, which
  // Run sends to it.
  absl::Status Examine(int socket) const;

  const std::string path_;
  const std::string ssd_path_;
  const std::function<void()> requested_;
  UniqueFd wake_;
  UniqueFd listener_;
  Mutex mutex_;
  UniqueFd successor_ ABSL_GUARDED_BY(mutex_);
  Thread thread_;
};

// The first one's side, after its daemon is gone: sends `memory`, whose descriptors stay the
// caller's, and waits until the successor serves. Returns its pid, 0 in another namespace. Errors:
// it does not serve; kDeadlineExceeded: it has not said whether it does.
absl::StatusOr<int> HandMemoryOver(int successor, const storage::HandedOverMemory& memory,
                                   Duration timeout);

// The second one's side.
struct Takeover {
  UniqueFd predecessor;  // connection to the process that waits for ConfirmTakeover
  std::unique_ptr<storage::HandedOverMemory> memory;  // null: none of it can be used
};

// Sends a request to the running crumbd, and waits up to `timeout` for its memory. kNotFound: none
// runs; kUnavailable: it ended meanwhile; kFailedPrecondition: it refuses and goes on;
// kDeadlineExceeded.
absl::StatusOr<Takeover> TakeOver(const Options& options, Duration timeout);

// Reports to the predecessor that its successor serves, and waits up to `timeout` until it has
// ended.
absl::Status ConfirmTakeover(Takeover takeover, Duration timeout);

}  // namespace crumb::server
