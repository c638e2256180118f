// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "common/clock.h"
#include "transport/connection.h"
#include "transport/counters.h"
#include "transport/outgoing_response.h"
#include "transport/progress_thread.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// A peer's fetch that is in flight. It lives, and holds its lease, until its last frame was sent or
// dropped.
struct Serve {
  Serve(Counters& all_counters, Timers& all_timers, uint64_t from, FetchId number, FetchBody wanted,
        TimePoint until)
      : counters(all_counters),
        timers(all_timers),
        connection(from),
        fetch(number),
        body(std::move(wanted)),
        deadline(until) {
    counters.serves_in_flight.fetch_add(1);
  }
  ~Serve() {
    timers.Remove(timer);
    counters.serves_in_flight.fetch_sub(1);
    counters.serve_bytes_in_flight.fetch_sub(bytes);
    counters.refusal_bytes.fetch_sub(refusal_bytes);
  }
  Serve(const Serve&) = delete;
  Serve& operator=(const Serve&) = delete;

  Counters& counters;
  Timers& timers;
  Timers::Id timer{};
  const uint64_t connection;
  const FetchId fetch;
  const FetchBody body;
  const TimePoint deadline;
  std::optional<OutgoingResponse> response;
  uint64_t bytes = 0;          // tiles, as counted in serve_bytes_in_flight
  uint64_t refusal_bytes = 0;  // memory, as counted in refusal_bytes
  int responses_unsent = 0;    // kResponse frames that the link has not sent
};

// Serves peers' fetches: it passes each request to the source and sends the leased fragments, a
// bounded number of frames at a time.
//
// The memory that a peer makes this node hold is bounded at every stage. A request counts against
// serves_max until its last frame has left; if the peer cancels it, until the source has replied,
// because the source continues to read. Requests beyond serves_max get the status kBusy. These
// replies wait until the peer reads them; if they take more than refusals_bytes_max, the connection
// that sends the next request is closed. Belongs to the progress thread.
class Responder {
 public:
  struct Parts {
    const TransportOptions& options;
    Counters& counters;
    Timers& timers;
    const Clock& clock;
    ConnectionHost& host;
    FragmentSource* source;  // null: every request is refused
    std::shared_ptr<Inbox> inbox;
  };

  explicit Responder(Parts parts) : parts_(std::move(parts)) {}

  // REQUIRES: the caller breaks the connection on an error. kDataLoss: the frame is malformed.
  // kResourceExhausted: the peer does not read its replies.
  absl::Status OnFetch(Connection& connection, const FrameHeader& header,
                       std::span<const std::byte> body);
  // Drops a serve that its peer does not want any more, with the frames that are not in the link
  // yet.
  void OnCancel(Connection& connection, const FrameHeader& header);

 private:
  // Takes the source's response, in a task of the inbox. Drops it, with its lease, if the serve has
  // ended.
  void OnReply(const std::weak_ptr<Serve>& weak, SourceResponse response);
  // Replies with `status` for all pages. kResourceExhausted: refusals_bytes_max is reached.
  absl::Status Refuse(Connection& connection, const std::shared_ptr<Serve>& serve,
                      PageStatus status);
  // Queues a response for sending. Replies kBusy instead if serve_bytes_max is reached, unless
  // nothing else is being sent.
  void Respond(Connection& connection, const std::shared_ptr<Serve>& serve,
               SourceResponse response);
  // Posts frames of the connection's serves, in their order, until 32 are in the link.
  void Pump(Connection& connection);
  // Posts one frame. Returns false if the serve has no frames left or is late.
  bool SendNext(Connection& connection, const std::shared_ptr<Serve>& serve);
  // Handles the end of a frame's send: posts the next ones.
  void OnSent(uint64_t connection);
  // Closes the connection of a peer that has not read its response in time, because the response
  // holds a lease.
  void OnStuck(const std::weak_ptr<Serve>& weak);

  const Parts parts_;
  // Requests to which the source has not replied. Late replies share it, so it may outlive this.
  const std::shared_ptr<std::atomic<uint64_t>> unreplied_ =
      std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace crumb::transport
