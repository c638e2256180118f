// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/requester.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace crumb::transport {

absl::StatusOr<Connection*> Requester::ConnectionTo(const std::string& address) {
  if (stopped_) return absl::UnavailableError("the transport is stopping");
  if (peers_.size() >= static_cast<size_t>(parts_.options.connections_max)) {
    std::erase_if(peers_, [](const auto& entry) { return entry.second.connection == 0; });
  }
  Peer& peer = peers_[address];
  if (Connection* connection = parts_.host.Find(peer.connection)) return connection;
  if (parts_.clock.Now() < peer.retry_at) return peer.last_error;
  absl::StatusOr<Connection*> opened = parts_.host.Open(address);
  if (opened.ok()) {
    peer.connection = (*opened)->id;
  } else {
    peer.last_error = opened.status();
  }
  return opened;
}

void Requester::Start(FetchId id, const std::string& address, FetchRequest request,
                      FetchDone done) {
  auto fetch = std::make_shared<Fetch>(id, std::move(request));
  fetch->done = std::move(done);
  const TimePoint deadline = fetch->state.request().deadline;
  if (deadline <= parts_.clock.Now()) {
    return Finish(fetch, PageStatus::kDeadline, absl::OkStatus());
  }
  const absl::StatusOr<Connection*> connection = ConnectionTo(address);
  if (!connection.ok()) return Finish(fetch, PageStatus::kUnavailable, connection.status());
  fetch->connection = (*connection)->id;
  fetch->timer = parts_.timers.Add(deadline, [this, id] { OnDeadline(id); });
  (*connection)->fetches.insert(id);
  fetches_.emplace(id, fetch);
  if ((*connection)->phase == Connection::Phase::kUp) Send(**connection, *fetch);
}

void Requester::Send(Connection& connection, Fetch& fetch) {
  OutgoingFrame frame;
  frame.header.type = FrameType::kFetch;
  const TimePoint now = parts_.clock.Now();
  frame.body = EncodeFetch(fetch.state.Body(now));
  connection.used = now;
  connection.Send(std::move(frame), fetch.id, nullptr, nullptr);
}

void Requester::OnUp(Connection& connection) {
  peers_[connection.address].pause = Duration::zero();
  for (const FetchId id : connection.fetches) Send(connection, *fetches_.at(id));
}

void Requester::Cancel(FetchId id) { Abandon(id, PageStatus::kCancelled, absl::OkStatus()); }

void Requester::OnDeadline(FetchId id) { Abandon(id, PageStatus::kDeadline, absl::OkStatus()); }

// Ends a fetch that its peer may still be serving.
void Requester::Abandon(FetchId id, PageStatus rest, const absl::Status& detail) {
  const auto found = fetches_.find(id);
  if (found == fetches_.end()) return;
  const FetchPtr fetch = found->second;
  Connection* connection = parts_.host.Find(fetch->connection);
  if (connection != nullptr && connection->phase == Connection::Phase::kUp) {
    OutgoingFrame frame;
    frame.header.type = FrameType::kCancel;
    connection->Send(std::move(frame), id, nullptr, nullptr);
  }
  Finish(fetch, rest, detail);
}

void Requester::Finish(const FetchPtr& fetch, PageStatus rest, const absl::Status& detail) {
  if (Connection* connection = parts_.host.Find(fetch->connection)) {
    connection->fetches.erase(fetch->id);
    connection->used = parts_.clock.Now();
  }
  parts_.timers.Remove(fetch->timer);
  fetches_.erase(fetch->id);
  fetch->ended = true;
  FetchResponse response = fetch->state.Finish(rest, detail);
  for (size_t i = 0; i < response.pages.size(); ++i) {
    const PageStatus status = response.pages[i].status;
    parts_.counters.pages_fetched[static_cast<size_t>(status)].Add();
    if (status != PageStatus::kHit) continue;
    const RequestedPage& requested = fetch->state.request().pages[i];
    parts_.counters.bytes_fetched.Add(static_cast<uint64_t>(requested.range.tiles()) *
                                      requested.tile_bytes);
  }
  finished_.push_back({fetch, std::move(response)});
}

bool Requester::RunFinished() {
  if (finished_.empty()) return false;
  for (Finished& finished : std::exchange(finished_, {})) {
    const FetchPtr& fetch = finished.fetch;
    parts_.counters.fetches_in_flight.fetch_sub(1);
    if (fetch->done) fetch->done(std::move(finished.response));
    fetch->done = nullptr;
    if (fetch->pulls > 0) {
      Quarantine(fetch);
    } else {
      fetch->state.DropMemory();
    }
  }
  return true;
}

void Requester::Quarantine(const FetchPtr& fetch) {
  parts_.counters.quarantined.Add();
  const uint64_t bytes = parts_.counters.quarantine_bytes.fetch_add(fetch->pull_bytes);
  const uint64_t connection = fetch->connection;
  if (bytes + fetch->pull_bytes > parts_.options.quarantine_bytes_max.value) {
    return BreakForced(connection, "too many bytes in quarantine");
  }
  const std::weak_ptr<Fetch> weak = fetch;
  parts_.timers.Add(parts_.clock.Now() + parts_.options.quarantine_for, [this, weak, connection] {
    const FetchPtr kept = weak.lock();
    if (kept && kept->pulls > 0) BreakForced(connection, "a transfer did not end");
  });
}

void Requester::BreakForced(uint64_t connection, const char* why) {
  Connection* found = parts_.host.Find(connection);
  if (found == nullptr) return;
  parts_.counters.forced_closes.Add();
  parts_.host.Break(*found, absl::DeadlineExceededError(std::string("closed by force: ") + why));
}

Requester::FetchPtr Requester::Of(const Connection& connection, FetchId id) const {
  const auto found = fetches_.find(id);
  if (found == fetches_.end() || found->second->connection != connection.id) {
    parts_.counters.frames_stale.Add();
    return nullptr;
  }
  return found->second;
}

absl::Status Requester::OnResponse(Connection& connection, const FrameHeader& header,
                                   std::span<const std::byte> body) {
  const FetchPtr fetch = Of(connection, header.fetch);
  if (!fetch) return absl::OkStatus();
  CRUMB_RETURN_IF_ERROR(fetch->state.TakeResponse(body));
  if (fetch->state.complete()) Finish(fetch, PageStatus::kUnavailable, absl::OkStatus());
  return absl::OkStatus();
}

absl::Status Requester::OnData(Connection& connection, const FrameHeader& header,
                               Arrival& arrival) {
  const FetchPtr fetch = Of(connection, header.fetch);
  if (!fetch) return absl::OkStatus();
  CRUMB_ASSIGN_OR_RETURN(const std::optional<TileBatch> batch,
                         fetch->state.Claim(header, arrival.size()));
  if (!batch) return absl::OkStatus();
  if (arrival.data() == nullptr) {
    ++fetch->pulls;
    fetch->pull_bytes += arrival.size();
    arrival.Pull(fetch->state.Places(*batch),
                 [this, fetch, batch = *batch](const absl::Status& status) {
                   OnPulled(fetch, batch, status);
                 });
    return absl::OkStatus();
  }
  fetch->state.Deliver(*batch, {arrival.data(), arrival.size()});
  if (fetch->state.complete()) Finish(fetch, PageStatus::kUnavailable, absl::OkStatus());
  return absl::OkStatus();
}

void Requester::OnPulled(const FetchPtr& fetch, const TileBatch& batch,
                         const absl::Status& status) {
  const uint64_t bytes = fetch->state.BatchBytes(batch);
  --fetch->pulls;
  fetch->pull_bytes -= bytes;
  if (fetch->ended) {
    if (fetch->done) return;  // RunFinished has not run: it is not in quarantine yet
    parts_.counters.quarantine_bytes.fetch_sub(bytes);
    if (fetch->pulls == 0) fetch->state.DropMemory();
    return;
  }
  fetch->state.Land(batch, status);
  if (fetch->state.complete()) Finish(fetch, PageStatus::kUnavailable, absl::OkStatus());
}

void Requester::OnDown(Connection& connection, const absl::Status& status) {
  const bool was_up = connection.phase == Connection::Phase::kUp;
  const absl::Status why = was_up && absl::IsFailedPrecondition(status)
                               ? absl::UnavailableError(status.message())
                               : status;
  const auto peer = peers_.find(connection.address);
  if (peer != peers_.end() && peer->second.connection == connection.id) {
    peer->second.connection = 0;
    peer->second.last_error = why;
    const bool failed =
        connection.phase == Connection::Phase::kHello || !connection.fetches.empty();
    const TransportOptions& options = parts_.options;
    Duration& pause = peer->second.pause;
    if (failed) {
      pause = std::clamp(2 * pause, options.reconnect_after_min, options.reconnect_after_max);
      peer->second.retry_at = parts_.clock.Now() + pause;
    }
  }
  for (const FetchId id : std::exchange(connection.fetches, {})) {
    const auto found = fetches_.find(id);
    if (found != fetches_.end()) Finish(FetchPtr(found->second), PageStatus::kUnavailable, why);
  }
}

void Requester::Disconnect(const std::string& address) {
  const auto peer = peers_.find(address);
  if (peer == peers_.end()) return;
  if (Connection* connection = parts_.host.Find(peer->second.connection)) {
    parts_.host.Break(*connection, absl::UnavailableError("disconnected from " + address));
  }
  peers_.erase(address);
}

void Requester::Stop() {
  stopped_ = true;
  while (!fetches_.empty()) {
    Finish(FetchPtr(fetches_.begin()->second), PageStatus::kUnavailable,
           absl::UnavailableError("the transport is stopping"));
  }
  RunFinished();
}

}  // namespace crumb::transport
