// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/protocol.h"

#include <sys/random.h>

#include <utility>

#include "common/limited_log.h"
#include "common/status_macros.h"
#include "transport/responder.h"

namespace crumb::transport {
namespace {

// A connection's number. It is random because a frame belongs to the connection whose number it
// carries, and peers must not be able to guess the numbers of others.
absl::StatusOr<uint64_t> RandomNumber() {
  uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    return absl::InternalError("getrandom returned no random bytes");
  }
  return number;
}

std::span<const std::byte> BodyOf(const Arrival& arrival) {
  return {arrival.data(), arrival.data() == nullptr ? 0 : arrival.size()};
}

}  // namespace

Protocol::Protocol(TransportOptions options, FragmentSource* source, LinkMaker& links,
                   const Clock& clock, std::function<void()> wake, FrameVersions supported)
    : options_(std::move(options)),
      supported_(supported),
      clock_(clock),
      links_(links),
      inbox_(std::make_shared<Inbox>(std::move(wake))),
      requester_({options_, counters_, timers_, clock_, *this}),
      responder_({options_, counters_, timers_, clock_, *this, source, inbox_}) {}

absl::StatusOr<FetchId> Protocol::Fetch(const std::string& address, FetchRequest request,
                                        FetchDone done) {
  CRUMB_RETURN_IF_ERROR(
      IncomingFetch::Check(request, static_cast<size_t>(options_.fetch_pages_max)));
  if (counters_.fetches_in_flight.fetch_add(1) >= static_cast<uint64_t>(options_.fetches_max)) {
    counters_.fetches_in_flight.fetch_sub(1);
    counters_.fetches_refused.Add();
    return absl::ResourceExhaustedError(
        "transport.fetches_max fetches are in flight; try again later");
  }
  const FetchId id = last_fetch_.fetch_add(1) + 1;
  const bool posted =
      inbox_->Post([this, id, address, kept = std::make_shared<FetchRequest>(std::move(request)),
                    done = std::move(done)]() mutable {
        requester_.Start(id, address, std::move(*kept), std::move(done));
      });
  if (!posted) {
    counters_.fetches_in_flight.fetch_sub(1);
    return absl::FailedPreconditionError("the transport was stopped");
  }
  counters_.fetches.Add();
  return id;
}

void Protocol::Cancel(FetchId fetch) {
  inbox_->Post([this, fetch] { requester_.Cancel(fetch); });
}

void Protocol::Connect(const std::string& address) {
  inbox_->Post([this, address] { requester_.Connect(address); });
}

void Protocol::Disconnect(const std::string& address) {
  inbox_->Post([this, address] { requester_.Disconnect(address); });
}

bool Protocol::Step() {
  broken_.clear();
  bool did = false;
  for (Inbox::Task& task : inbox_->Take()) {
    task();
    did = true;
  }
  if (timers_.Next() != TimePoint::max()) timers_.Run(clock_.Now());
  return requester_.RunFinished() || did || !broken_.empty();
}

void Protocol::Shutdown() {
  inbox_->Close();
  for (Inbox::Task& task : inbox_->Take()) task();
  requester_.Stop();
  while (!connections_.empty()) {
    Break(*connections_.begin()->second, absl::UnavailableError("the transport is stopping"));
  }
  requester_.Stop();
  broken_.clear();
  timers_.Clear();
}

absl::StatusOr<Connection*> Protocol::Add(std::unique_ptr<Link> link, const std::string& address,
                                          bool ours) {
  CRUMB_ASSIGN_OR_RETURN(const uint64_t id, RandomNumber());
  auto connection = std::make_unique<Connection>();
  connection->id = id;
  connection->ours = ours;
  connection->address = address;
  connection->link = std::move(link);
  connection->used = clock_.Now();
  connection->timer = timers_.Add(clock_.Now() + options_.connect_timeout, [this, id] {
    if (Connection* late = Find(id)) {
      Break(*late, absl::DeadlineExceededError(late->address + " did not say hello in time"));
    }
  });
  by_link_.emplace(connection->link.get(), id);
  counters_.connections_opened.Add();
  Connection* raw = connection.get();
  connections_.emplace(id, std::move(connection));
  counters_.connections = connections_.size();
  return raw;
}

absl::StatusOr<Connection*> Protocol::Open(const std::string& address) {
  if (connections_.size() >= static_cast<size_t>(options_.connections_max)) {
    counters_.connections_refused.Add();
    return absl::ResourceExhaustedError(
        "transport.connections_max connections are open; raise it or reduce the number of peers");
  }
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<Link> link, links_.MakeLink(address));
  CRUMB_ASSIGN_OR_RETURN(Connection* const connection, Add(std::move(link), address, true));
  SendHello(*connection);
  return connection;
}

void Protocol::OnAccepted(std::unique_ptr<Link> link, const std::string& address) {
  if (connections_.size() >= static_cast<size_t>(options_.connections_max)) {
    counters_.connections_refused.Add();
    return;
  }
  const absl::StatusOr<Connection*> added = Add(std::move(link), address, false);
  if (!added.ok()) LogWarningLimited("peer {}: {}", address, std::string(added.status().message()));
}

Connection* Protocol::Find(uint64_t connection) {
  const auto found = connections_.find(connection);
  return found == connections_.end() ? nullptr : found->second.get();
}

void Protocol::Break(Connection& connection, const absl::Status& why) {
  const auto found = connections_.find(connection.id);
  if (found == connections_.end()) return;
  broken_.push_back(std::move(found->second));
  connections_.erase(found);
  counters_.connections = connections_.size();
  by_link_.erase(connection.link.get());
  timers_.Remove(connection.timer);
  connection.serves.clear();
  connection.sending.clear();
  if (connection.ours) requester_.OnDown(connection, why);
}

void Protocol::OnDown(Link* link, const absl::Status& status) {
  const auto found = by_link_.find(link);
  if (found == by_link_.end()) return;
  Connection& connection = *connections_.at(found->second);
  const bool at_work = connection.phase == Connection::Phase::kHello ||
                       !connection.fetches.empty() || !connection.serves.empty();
  if (at_work) {
    counters_.connections_failed.Add();
    LogWarningLimited("connection {} {} failed: {}", connection.ours ? "to" : "from",
                      connection.address, std::string(status.message()));
  }
  Break(connection, status);
}

Hello Protocol::OwnHello() const {
  Hello hello;
  hello.version_min = supported_.min;
  hello.version_max = supported_.max;
  return hello;
}

void Protocol::SendHello(Connection& connection) {
  Hello hello = OwnHello();
  hello.connection = connection.id;
  OutgoingFrame frame;
  frame.header.type = FrameType::kHello;
  frame.body = EncodeHello(hello);
  const uint16_t version = std::exchange(connection.version, supported_.max);
  const uint64_t theirs = std::exchange(connection.theirs, 0);
  connection.Send(std::move(frame), 0, nullptr, nullptr);
  connection.version = version;
  connection.theirs = theirs;
}

absl::Status Protocol::OnHello(Connection& connection, const FrameHeader& header,
                               const Arrival& arrival) {
  if (connection.phase != Connection::Phase::kHello)
    return absl::DataLossError("the peer sent a second hello");
  CRUMB_RETURN_IF_ERROR(CheckBody(header, BodyOf(arrival)));
  CRUMB_ASSIGN_OR_RETURN(const Hello hello, DecodeHello(BodyOf(arrival)));
  connection.theirs = hello.connection;
  const absl::StatusOr<uint16_t> version = CommonVersion(OwnHello(), hello);
  if (!connection.ours) SendHello(connection);
  if (!version.ok()) {
    counters_.version_mismatches.Add();
    // The side that accepted waits until the peer has read its hello and closed the connection; the
    // timer for the hello still runs.
    return connection.ours ? version.status() : absl::OkStatus();
  }
  connection.version = *version;
  connection.phase = Connection::Phase::kUp;
  timers_.Remove(connection.timer);
  WatchIdle(connection);
  if (connection.ours) requester_.OnUp(connection);
  return absl::OkStatus();
}

// The side that connected closes an idle connection first, because it knows whether it is about to
// send a request.
Duration Protocol::IdleLimit(const Connection& connection) const {
  return connection.ours ? options_.idle_connection : 2 * options_.idle_connection;
}

void Protocol::WatchIdle(Connection& connection) {
  connection.timer = timers_.Add(connection.used + IdleLimit(connection),
                                 [this, id = connection.id] { OnIdleTimer(id); });
}

void Protocol::OnIdleTimer(uint64_t id) {
  Connection* connection = Find(id);
  if (connection == nullptr) return;
  if (!connection->fetches.empty() || !connection->serves.empty()) connection->used = clock_.Now();
  if (connection->used + IdleLimit(*connection) > clock_.Now()) return WatchIdle(*connection);
  Break(*connection,
        absl::UnavailableError("the connection was idle for transport.idle_connection"));
}

absl::Status Protocol::Dispatch(Connection& connection, const FrameHeader& header,
                                Arrival& arrival) {
  if (header.type == FrameType::kHello) return OnHello(connection, header, arrival);
  if (connection.phase != Connection::Phase::kUp || header.version != connection.version) {
    return absl::DataLossError("a frame has another version than the hellos agreed on");
  }
  const bool for_requester = header.type == FrameType::kResponse || header.type == FrameType::kData;
  if (for_requester != connection.ours)
    return absl::DataLossError("a frame does not belong to the role of the peer");
  if (header.type == FrameType::kData) return requester_.OnData(connection, header, arrival);
  const std::span<const std::byte> body = BodyOf(arrival);
  if (body.size() != arrival.size())
    return absl::DataLossError("a control frame was sent by rendezvous");
  CRUMB_RETURN_IF_ERROR(CheckBody(header, body));
  if (header.type == FrameType::kResponse) return requester_.OnResponse(connection, header, body);
  if (header.type == FrameType::kFetch) return responder_.OnFetch(connection, header, body);
  responder_.OnCancel(connection, header);
  return absl::OkStatus();
}

void Protocol::OnFrame(Link* link, std::span<const std::byte> bytes, Arrival& arrival) {
  const absl::StatusOr<FrameHeader> header = DecodeFrameHeader(bytes);
  uint64_t id = header.ok() ? header->connection : 0;
  // A frame is assigned to a connection by its link only if it is a hello, which has no number yet,
  // or damaged.
  if (link != nullptr && (!header.ok() || header->type == FrameType::kHello)) {
    const auto found = by_link_.find(link);
    id = found == by_link_.end() ? 0 : found->second;
  }
  Connection* connection = Find(id);
  if (connection == nullptr) {
    (header.ok() ? counters_.frames_stale : counters_.frames_refused).Add();
    return;
  }
  const absl::Status status =
      header.ok() ? Dispatch(*connection, *header, arrival) : header.status();
  if (status.ok()) return;
  if (status.code() == absl::StatusCode::kDataLoss) counters_.frames_refused.Add();
  LogWarningLimited("connection {} {} closed: {}", connection->ours ? "to" : "from",
                    connection->address, std::string(status.message()));
  Break(*connection, status);
}

}  // namespace crumb::transport
