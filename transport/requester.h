// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "transport/connection.h"
#include "transport/counters.h"
#include "transport/incoming_fetch.h"
#include "transport/progress_thread.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// Runs this node's fetches: it connects to peers with pauses after failures, sends requests,
// enforces deadlines, and keeps the memory of ended fetches in quarantine while transfers may write
// to it.
//
//   Start --> sent when the connection is up --> all responses received --> every page ended -->
//   Finish --> done
//     \-- deadline, Cancel, or a broken connection --> Finish; unfinished transfers: quarantine
//
// Belongs to the progress thread.
class Requester {
 public:
  struct Parts {
    const TransportOptions& options;
    Counters& counters;
    Timers& timers;
    const Clock& clock;
    ConnectionHost& host;
  };

  explicit Requester(const Parts& parts) : parts_(parts) {}

  // Starts a fetch; RunFinished calls `done`. REQUIRES: the caller has counted it in
  // fetches_in_flight. A fetch without a connection, whose peer is in the pause after a failure,
  // ends at once as kUnavailable.
  void Start(FetchId id, const std::string& address, FetchRequest request, FetchDone done);
  // Ends a fetch as kCancelled and sends the peer a kCancel frame.
  void Cancel(FetchId id);
  void Connect(const std::string& address) { (void)ConnectionTo(address); }
  void Disconnect(const std::string& address);

  // REQUIRES: this node opened the connection, and its phase is kUp now.
  void OnUp(Connection& connection);
  // REQUIRES: the caller breaks the connection on an error. kDataLoss: the frame is malformed.
  absl::Status OnResponse(Connection& connection, const FrameHeader& header,
                          std::span<const std::byte> body);
  absl::Status OnData(Connection& connection, const FrameHeader& header, Arrival& arrival);
  // Handles the end of a connection that this node opened: ends its fetches, and sets the pause
  // before the next attempt if it failed.
  void OnDown(Connection& connection, const absl::Status& why);

  // Calls `done` of the fetches that have ended. Returns false if there were none.
  bool RunFinished();
  // Ends all fetches as kUnavailable, including those that are started later.
  void Stop();

 private:
  // The connection to a peer, 0 if there is none, and the pause after failures, which doubles.
  struct Peer {
    uint64_t connection = 0;
    TimePoint retry_at{};
    Duration pause{};
    absl::Status last_error;
  };
  struct Fetch {
    Fetch(FetchId number, FetchRequest request) : id(number), state(std::move(request)) {}
    const FetchId id;
    IncomingFetch state;
    FetchDone done;
    uint64_t connection = 0;
    Timers::Id timer{};
    bool ended = false;
    int pulls = 0;  // transfers into its memory, which cannot be cancelled
    uint64_t pull_bytes = 0;
  };
  using FetchPtr = std::shared_ptr<Fetch>;
  struct Finished {
    FetchPtr fetch;
    FetchResponse response;
  };

  // Returns the connection to the peer, in any phase, and opens it if there is none. Returns the
  // last error while the pause after a failure lasts.
  absl::StatusOr<Connection*> ConnectionTo(const std::string& address);
  // Sends the request. REQUIRES: the connection is up.
  void Send(Connection& connection, Fetch& fetch);
  void OnDeadline(FetchId id);
  // Ends a fetch that its peer may still be serving, and sends the peer a kCancel.
  void Abandon(FetchId id, PageStatus rest, const absl::Status& detail);
  // Ends a fetch; RunFinished calls its `done` in the next step. Pages without an outcome get
  // `rest`.
  void Finish(const FetchPtr& fetch, PageStatus rest, const absl::Status& detail);
  // Keeps the memory of an ended fetch whose transfers may still write to it; closes the connection
  // by force beyond the bounds of bytes and time.
  void Quarantine(const FetchPtr& fetch);
  // Handles the end of a transfer, of a fetch in flight or in quarantine.
  void OnPulled(const FetchPtr& fetch, const TileBatch& batch, const absl::Status& status);
  void BreakForced(uint64_t connection, const char* why);
  // Returns the fetch that a frame belongs to; null, and counted as stale, if it has ended.
  FetchPtr Of(const Connection& connection, FetchId id) const;

  const Parts parts_;
  bool stopped_ = false;
  std::unordered_map<std::string, Peer> peers_;
  std::unordered_map<FetchId, FetchPtr> fetches_;
  std::vector<Finished> finished_;
};

}  // namespace crumb::transport
