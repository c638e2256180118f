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

// Where loopback transports find each other. Outlives them. Thread-safe.
class LoopbackNetwork {
 public:
  // A frame underway, header and body. A tap may change it, take it away or add others before and
  // behind; called on the sender's progress thread.
  struct Frame {
    std::vector<std::byte> header;
    std::vector<std::byte> body;
  };
  using Tap = std::function<std::vector<Frame>(Frame frame)>;

  LoopbackNetwork();
  ~LoopbackNetwork();

  // Applies to all frames from now on; empty: none.
  void SetTap(Tap tap);

  // Opens a transport at options.listen, whose port may be 0; nowhere when that is empty. `source`
  // may be null and outlives the transport. kUnavailable: the address is taken.
  absl::StatusOr<std::unique_ptr<Transport>> Open(TransportOptions options, FragmentSource* source);

 private:
  class State;
  class LoopbackTransport;
  class LoopbackLink;
  const std::shared_ptr<State> state_;
};

}  // namespace crumb::transport
