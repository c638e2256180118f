// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
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
//
// What a peer makes this node hold is bounded at every stage. A request counts against serves_max
// until its last frame has left, and until the source has replied even where the peer has cancelled
// it meanwhile, because the source goes on reading. Requests above that are answered busy; these
// answers wait for the peer to read, and when they take more than refusals_bytes_max the connection
// that asks for the next one is broken. Belongs to the progress thread.
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
  // kResourceExhausted: the connection is to be broken.
  absl::Status Refuse(Connection& connection, const std::shared_ptr<Serve>& serve,
                      PageStatus status);
  void Answer(Connection& connection, const std::shared_ptr<Serve>& serve, SourceAnswer answer);
  void Pump(Connection& connection);
  bool SendNext(Connection& connection, const std::shared_ptr<Serve>& serve);
  void OnSent(uint64_t connection);
  void OnStuck(const std::weak_ptr<Serve>& weak);

  const Parts parts_;
  // Requests that the source has not replied to. Outlives this in replies that come late.
  const std::shared_ptr<std::atomic<uint64_t>> asked_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace crumb::transport
