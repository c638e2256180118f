// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/connection.h"
#include "transport/counters.h"
#include "transport/link.h"
#include "transport/progress_thread.h"
#include "transport/requester.h"
#include "transport/responder.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// The protocol on top of links: it keeps the connections, exchanges hellos, and passes frames to
// the requester and the responder. A progress thread drives it with Step; calls from other threads
// reach that thread through the inbox.
//
// One object per transport, the same over UCX and over the loopback network, so that tests of the
// loopback run the code of production. Nothing here blocks and, except the inbox and the counters,
// nothing is locked, because the progress thread alone touches it. A connection without traffic is
// closed after its idle time; a frame that cannot be parsed ends the connection.
class Protocol final : public LinkEvents, private ConnectionHost {
 public:
  // `wake` ends the sleep of the progress thread. `source` may be null: every request is refused.
  Protocol(TransportOptions options, FragmentSource* source, LinkMaker& links, const Clock& clock,
           std::function<void()> wake, FrameVersions supported = {});

  // Any thread may call these functions, whose contracts are those of Transport.
  absl::StatusOr<FetchId> Fetch(const std::string& address, FetchRequest request, FetchDone done);
  void Cancel(FetchId fetch);
  void Connect(const std::string& address);
  void Disconnect(const std::string& address);
  TransportStats stats() const { return counters_.Snapshot(); }
  const std::shared_ptr<Inbox>& inbox() const { return inbox_; }

  // The functions below belong to the progress thread. Step returns whether it did anything.
  bool Step();
  // Returns the time until which the thread may sleep if no event comes.
  TimePoint NextTimer() const { return timers_.Next(); }
  // Returns whether a fetch or a serve is in flight, so that frames may arrive at any moment.
  bool Expecting() const {
    return counters_.fetches_in_flight > 0 || counters_.serves_in_flight > 0;
  }
  // Ends everything except pulls and sends that are still in links.
  void Shutdown();

  void OnAccepted(std::unique_ptr<Link> link, const std::string& address) override;
  void OnFrame(Link* link, std::span<const std::byte> header, Arrival& arrival) override;
  void OnDown(Link* link, const absl::Status& status) override;

 private:
  absl::StatusOr<Connection*> Open(const std::string& address) override;
  Connection* Find(uint64_t connection) override;
  void Break(Connection& connection, const absl::Status& why) override;

  // Adds a connection in kHello, which is broken if the peer's hello does not arrive in
  // connect_timeout.
  absl::StatusOr<Connection*> Add(std::unique_ptr<Link> link, const std::string& address,
                                  bool ours);
  // Returns this node's hello without the connection's number.
  Hello OwnHello() const;
  // Sends the hello of a connection, whose header carries no agreed version yet.
  void SendHello(Connection& connection);
  // Takes the peer's hello; the side that accepted replies with its own. kFailedPrecondition: there
  // is no common version.
  absl::Status OnHello(Connection& connection, const FrameHeader& header, const Arrival& arrival);
  // Passes a frame to the part that it is for. An error ends the connection.
  absl::Status Dispatch(Connection& connection, const FrameHeader& header, Arrival& arrival);
  // Returns the time after which the connection is closed if it carries nothing.
  Duration IdleLimit(const Connection& connection) const;
  // Sets the timer for the idle time, and handles it: closes the connection, or waits on.
  void WatchIdle(Connection& connection);
  void OnIdleTimer(uint64_t connection);

  const TransportOptions options_;
  const FrameVersions supported_;
  const Clock& clock_;
  LinkMaker& links_;
  Counters counters_;
  Timers timers_;
  const std::shared_ptr<Inbox> inbox_;
  std::atomic<FetchId> last_fetch_{0};
  // Connections by their number, and numbers by link.
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<const Link*, uint64_t> by_link_;
  // Ended connections until the next Step, because a link must not be destroyed during its own
  // call.
  std::vector<std::unique_ptr<Connection>> broken_;
  Requester requester_;
  Responder responder_;
};

}  // namespace crumb::transport
