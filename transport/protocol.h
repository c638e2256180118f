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

  absl::StatusOr<Connection*> Add(std::unique_ptr<Link> link, const std::string& address,
                                  bool ours);
  Hello OwnHello() const;
  void SendHello(Connection& connection);
  absl::Status OnHello(Connection& connection, const FrameHeader& header, const Arrival& arrival);
  absl::Status Dispatch(Connection& connection, const FrameHeader& header, Arrival& arrival);
  Duration IdleLimit(const Connection& connection) const;
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
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<const Link*, uint64_t> by_link_;
  // Ended connections until the next Step, because a link must not be destroyed during its own
  // call.
  std::vector<std::unique_ptr<Connection>> broken_;
  Requester requester_;
  Responder responder_;
};

}  // namespace crumb::transport
