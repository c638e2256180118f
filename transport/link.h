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
#include "transport/outgoing_response.h"

// The interfaces between the protocol and the medium that carries its frames: UCX, or the loopback
// fake. All objects belong to one progress thread.
namespace crumb::transport {

// A connection of the medium to one peer. Its destructor closes it by force: frames that were not
// sent are dropped, pulls in flight end with an error, and the protocol is not called back for
// either.
//
// Tiles are not copied to be sent: the medium reads them where the store has them.
class Link {
 public:
  virtual ~Link() = default;

  // Encodes the header and sends the frame. `keep` owns the memory of its tiles and is dropped when
  // nothing reads them any more; then `sent` is called, unless the link was destroyed before.
  // Failures are reported by LinkEvents::OnDown.
  virtual void Send(OutgoingFrame frame, std::shared_ptr<const void> keep,
                    std::function<void()> sent) = 0;
};

// The body of a frame that arrived. It is valid during OnFrame only.
//
// Small frames have their bytes with them. A large one is announced first, and Pull then transfers
// it straight to its destination (a rendezvous of UCX).
class Arrival {
 public:
  using Pulled = std::function<void(absl::Status)>;

  virtual ~Arrival() = default;

  virtual size_t size() const = 0;
  // The bytes, or null if they are still at the peer.
  virtual const std::byte* data() const = 0;
  // Transfers the bytes that are still at the peer to `places`, in order, size() bytes in all.
  // `pulled` is called once, even if the link was destroyed before; until then the transfer may
  // write to the places.
  virtual void Pull(std::vector<std::span<std::byte>> places, Pulled pulled) = 0;
};

// Receives the events of links, on the progress thread.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;

  // A peer connected. Its frames, including those with a null link, follow.
  virtual void OnAccepted(std::unique_ptr<Link> link, const std::string& address) = 0;
  // `link` is null unless the frame identifies its sender, which a hello does.
  virtual void OnFrame(Link* link, std::span<const std::byte> header, Arrival& arrival) = 0;
  virtual void OnDown(Link* link, const absl::Status& status) = 0;
};

class LinkMaker {
 public:
  virtual ~LinkMaker() = default;

  // Begins to connect; frames that are sent meanwhile wait. kInvalidArgument: `address` is no
  // numeric ADDRESS:PORT.
  virtual absl::StatusOr<std::unique_ptr<Link>> MakeLink(const std::string& address) = 0;
};

}  // namespace crumb::transport
