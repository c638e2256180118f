// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/transport.h"

// A transport inside one process, for tests: the same protocol over copies of frames.
namespace crumb::transport {

// The network in which loopback transports find each other. It must outlive them. Thread-safe.
// Frames are copied and delivered in order, so that a test without a tap sees no loss.
class LoopbackNetwork {
 public:
  // A frame in transit, header and body. A tap may change it, drop it, or add others before and
  // after it. It is called on the sender's progress thread.
  struct Frame {
    std::vector<std::byte> header;
    std::vector<std::byte> body;
  };
  using Tap = std::function<std::vector<Frame>(Frame frame)>;

  LoopbackNetwork();
  ~LoopbackNetwork();

  // Applies `tap` to all later frames. An empty function removes the tap.
  void SetTap(Tap tap);

  // Opens a transport that listens at options.listen, whose port may be 0; if that is empty, it
  // does not listen. `source` may be null and must outlive the transport. kUnavailable: the address
  // is in use.
  absl::StatusOr<std::unique_ptr<Transport>> Open(TransportOptions options, FragmentSource* source);

 private:
  class State;
  class LoopbackTransport;
  class LoopbackLink;
  const std::shared_ptr<State> state_;
};

}  // namespace crumb::transport
