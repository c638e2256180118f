// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/tenant_budget.h"
#include "common/unique_fd.h"

namespace crumb::server {

// Sends messages with descriptors to processes, and bounds how many descriptors they leave unread.
// The kernel counts descriptors in unread messages for each sending user, and refuses to send more
// of them than RLIMIT_NOFILE (ETOOMANYREFS). Without a bound a process that reads nothing keeps
// crumbd from sending descriptors to all other processes.
//
// Descriptors count from before they are sent until their socket has no unread bytes (SIOCOUTQ),
// also when crumbd's side of the socket was shut down meanwhile: the receiver still has the
// messages. Each owner, a user or tenant, has a part of the budget (TenantBudget). Thread-safe.
// FdListener owns it and shares it with the tasks that serve PoolRequests.
class UnreadDescriptors {
 public:
  using Socket = std::shared_ptr<const UniqueFd>;
  // Takes references to sockets that need not be looked at any more. Their last close may block.
  using Drop = std::function<void(const std::string& owner, Socket socket)>;

  // `total`: descriptors in unread messages. 0: half of the descriptors that the process may open.
  // An owner may have half of the descriptors that other owners leave unused; an owner without
  // unread ones may send one message beyond that, if the total allows it.
  UnreadDescriptors(uint64_t total, Drop drop);

  // Sends `bytes` with the first descriptors, and the others behind it in messages of one zero
  // byte. A message carries few of them, so that a receiver that closes each one once it is mapped
  // gets by with few free descriptors. kResourceExhausted, and nothing is sent: the owner's
  // processes leave too many unread; kUnavailable: the socket takes no more. Does not block.
  absl::Status Send(const std::string& owner, const Socket& socket, std::string bytes,
                    std::span<const int> fds);

  // Does the same for any number of descriptors: waits between messages, for `patience` in all,
  // until there is room. `begun` is set after the first message was sent.
  absl::Status SendPatiently(const std::string& owner, const Socket& socket, std::string bytes,
                             std::span<const int> fds, Duration patience, bool* begun);

  // Drops the references to all sockets; those of messages that are being sent once they are sent,
  // and those of later messages likewise.
  void Clear();

  // Returns the descriptors that count at the moment. They may have been read since the last Send.
  uint64_t used() const { return budget_.used(); }

 private:
  struct Unread {
    std::string owner;
    Socket socket;
    uint64_t descriptors = 0;
    // Messages that are being sent: until they are, the socket looks as if all was read.
    int sending = 0;
  };

  // Descriptors in one message, of `count` in all. At least 16 if the budget allows it, so that a
  // long list takes few messages.
  size_t BatchOf(size_t count) const;
  // Takes the budget of a message that is about to be sent, after a Sweep. kResourceExhausted:
  // there is none left, and nothing was taken. Sent must follow on success.
  absl::Status Take(const std::string& owner, const Socket& socket, uint64_t count);
  // Notes that a message of Take was sent, and returns the budget of those of its descriptors that
  // were not.
  void Sent(const Socket& socket, uint64_t not_sent);
  // Frees the budget of messages that were read: looks at every socket that had unread ones.
  void Sweep();

  const Drop drop_;
  TenantBudget budget_;
  Mutex mutex_;
  bool cleared_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<const UniqueFd*, Unread> unread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
