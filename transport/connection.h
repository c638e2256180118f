// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/crc32c.h"
#include "transport/link.h"
#include "transport/progress_thread.h"

namespace crumb::transport {

struct Serve;

// A link and the state of the protocol on it. The node that connected fetches, and the node that
// accepted serves; frames in the other roles end the connection.
//
//   kHello --(both hellos exchanged, a common version found)--> kUp --(Break)--> destroyed
//     \--(connect_timeout, a malformed hello, or no common version)--> destroyed
//
// Belongs to the progress thread.
//
// Each direction of page traffic has connections of its own: a node that both fetches from a peer
// and serves it has two. `ours` connections have `fetches`, the others have `serves`.
struct Connection {
  enum class Phase : uint8_t { kHello, kUp };

  uint64_t id = 0;      // random number that the peer puts into its frames
  uint64_t theirs = 0;  // the peer's number, which this node puts into its frames
  // The version of frames that both hellos agreed on; 0 in kHello.
  uint16_t version = 0;
  Phase phase = Phase::kHello;
  bool ours = false;  // this node connected, and fetches
  // Numeric ADDRESS:PORT of the peer, for logs and, if `ours`, to connect again.
  std::string address;
  std::unique_ptr<Link> link;
  TimePoint used;    // when it last carried a frame of a fetch or a serve
  Timers::Id timer;  // kHello: waits for the peer's hello; kUp: for the idle time

  std::unordered_set<FetchId> fetches;                         // this node's, in flight
  std::unordered_map<FetchId, std::shared_ptr<Serve>> serves;  // the peer's, in flight
  std::deque<std::shared_ptr<Serve>> sending;                  // those serves with frames left
  int frames_posted = 0;                                       // frames of serves in the link
  bool pumping = false;  // the responder is posting frames, so its callbacks do not post more

  // Completes the header of a frame and sends it; `keep` and `sent` are as in Link::Send.
  void Send(OutgoingFrame frame, FetchId fetch, std::shared_ptr<const void> keep,
            std::function<void()> sent) {
    frame.header.version = version;
    frame.header.connection = theirs;
    frame.header.fetch = fetch;
    if (frame.header.type != FrameType::kData) frame.header.body_sum = Crc32c(frame.body);
    link->Send(std::move(frame), std::move(keep), std::move(sent));
  }
};

// The owner of the connections, as the requester and the responder see it. Belongs to the progress
// thread.
//
// Protocol implements it. A Connection pointer is valid until Break of that connection; a task that
// runs later looks the connection up by its number.
class ConnectionHost {
 public:
  virtual ~ConnectionHost() = default;

  // Begins to connect. kResourceExhausted: connections_max connections are open.
  virtual absl::StatusOr<Connection*> Open(const std::string& address) = 0;
  // Returns null if the connection has ended.
  virtual Connection* Find(uint64_t connection) = 0;
  // Ends a connection. `connection` must not be used afterwards; its link is destroyed in the next
  // step of the progress thread, because it may be the caller.
  virtual void Break(Connection& connection, const absl::Status& why) = 0;
};

}  // namespace crumb::transport
