// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "common/clock.h"
#include "transport/connection_host.h"
#include "transport/counters.h"
#include "transport/inbox.h"
#include "transport/outgoing_answer.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// Peers' fetches: asks the source, and sends what it leased, a bounded number of frames at a time.
// Of the progress thread.
class Responder {
 public:
  struct Parts {
    const TransportOptions& options;
    Counters& counters;
    Timers& timers;
    const Clock& clock;
    ConnectionHost& host;
    FragmentSource* source;  // null: everything is refused
    std::shared_ptr<Inbox> inbox;
  };

  explicit Responder(Parts parts) : parts_(std::move(parts)) {}

  // kDataLoss: malformed, the connection is to be broken.
  absl::Status OnFetch(Connection& connection, const FrameHeader& header,
                       std::span<const std::byte> body);
  void OnCancel(Connection& connection, const FrameHeader& header);

 private:
  void OnReply(const std::weak_ptr<Serve>& weak, SourceAnswer answer);
  void Answer(Connection& connection, const std::shared_ptr<Serve>& serve, SourceAnswer answer);
  void Pump(Connection& connection);
  bool SendNext(Connection& connection, const std::shared_ptr<Serve>& serve);
  void OnSent(uint64_t connection);
  void OnStuck(const std::weak_ptr<Serve>& weak);

  const Parts parts_;
};

}  // namespace crumb::transport
