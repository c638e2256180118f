// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/outgoing_answer.h"

// What carries frames between two transports: UCX, or the loopback fake. All of it belongs to one
// progress thread.
namespace crumb::transport {

// A way to one peer. Destroying it closes it by force: frames that were not sent are dropped, pulls
// under way end with an error, and neither calls the protocol back.
class Link {
 public:
  virtual ~Link() = default;

  // Sends a frame with its header encoded; `keep` holds what its tiles point to and is dropped when
  // nothing reads them any more. `sent` is called then, unless the link was destroyed before.
  // Failures come as OnDown.
  virtual void Send(OutgoingFrame frame, std::shared_ptr<const void> keep,
                    std::function<void()> sent) = 0;
};

// The body of a frame that arrived; valid during OnFrame.
class Arrival {
 public:
  using Pulled = std::function<void(absl::Status)>;

  virtual ~Arrival() = default;

  virtual size_t size() const = 0;
  // The bytes, or null while they are still with the peer.
  virtual const std::byte* data() const = 0;
  // Brings bytes that are still with the peer into `places`, in order, together size() bytes.
  // `pulled` is called once, also after the link was destroyed: only then the places are free.
  virtual void Pull(std::vector<std::span<std::byte>> places, Pulled pulled) = 0;
};

// Who hears of links. Called on the progress thread.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;

  // A peer connected. Null events for it follow only after this.
  virtual void OnAccepted(std::unique_ptr<Link> link, const std::string& address) = 0;
  // `link` is null unless the frame says from whom it is (a hello does).
  virtual void OnFrame(Link* link, std::span<const std::byte> header, Arrival& arrival) = 0;
  virtual void OnDown(Link* link, const absl::Status& status) = 0;
};

class LinkMaker {
 public:
  virtual ~LinkMaker() = default;

  // Begins to connect; what is sent meanwhile waits. kInvalidArgument: no numeric ADDRESS:PORT.
  virtual absl::StatusOr<std::unique_ptr<Link>> MakeLink(const std::string& address) = 0;
};

}  // namespace crumb::transport
