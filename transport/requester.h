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
  // fetches_in_flight.
  void Start(FetchId id, const std::string& address, FetchRequest request, FetchDone done);
  void Cancel(FetchId id);
  void Connect(const std::string& address) { (void)ConnectionTo(address); }
  void Disconnect(const std::string& address);

  // REQUIRES: this node opened the connection, and its phase is kUp now.
  void OnUp(Connection& connection);
  // REQUIRES: the caller breaks the connection on an error. kDataLoss: the frame is malformed.
  absl::Status OnResponse(Connection& connection, const FrameHeader& header,
                          std::span<const std::byte> body);
  absl::Status OnData(Connection& connection, const FrameHeader& header, Arrival& arrival);
  void OnDown(Connection& connection, const absl::Status& why);

  // Calls `done` of the fetches that have ended. Returns false if there were none.
  bool RunFinished();
  // Ends all fetches as kUnavailable, including those that are started later.
  void Stop();

 private:
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

  absl::StatusOr<Connection*> ConnectionTo(const std::string& address);
  void Send(Connection& connection, Fetch& fetch);
  void OnDeadline(FetchId id);
  void Abandon(FetchId id, PageStatus rest, const absl::Status& detail);
  void Finish(const FetchPtr& fetch, PageStatus rest, const absl::Status& detail);
  void Quarantine(const FetchPtr& fetch);
  void OnPulled(const FetchPtr& fetch, const TileBatch& batch, const absl::Status& status);
  void BreakForced(uint64_t connection, const char* why);
  FetchPtr Of(const Connection& connection, FetchId id) const;

  const Parts parts_;
  bool stopped_ = false;
  std::unordered_map<std::string, Peer> peers_;
  std::unordered_map<FetchId, FetchPtr> fetches_;
  std::vector<Finished> finished_;
};

}  // namespace crumb::transport
