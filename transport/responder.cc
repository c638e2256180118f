// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/responder.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::transport {
namespace {

// Frames of one connection that are in the link at a time. It bounds the queue of UCX for a slow
// peer.
constexpr int kFramesPostedMax = 32;
// The longest time, in microseconds, for which a request is served, whatever its peer allows.
constexpr uint64_t kTimeLeftMaxUs = uint64_t{60} * 1000 * 1000;

SourceResponse AllOf(const FetchBody& fetch, PageStatus status) {
  SourceResponse response;
  response.pages.resize(fetch.pages.size(), SourcePage{status, {}});
  return response;
}

SourceRequest RequestOf(const Connection& connection, const Serve& serve) {
  SourceRequest request;
  request.session = serve.body.session;
  request.keyspace = serve.body.keyspace;
  request.generation = serve.body.generation;
  request.deadline = serve.deadline;
  request.peer = connection.address;
  for (const FetchBody::Page& page : serve.body.pages) {
    request.pages.push_back({page.key, page.range});
  }
  return request;
}

}  // namespace

absl::Status Responder::OnFetch(Connection& connection, const FrameHeader& header,
                                std::span<const std::byte> body) {
  CRUMB_ASSIGN_OR_RETURN(FetchBody fetch, DecodeFetch(body));
  if (connection.serves.count(header.fetch) > 0) {
    return absl::DataLossError("a fetch with this number is in flight already");
  }
  const TransportOptions& options = parts_.options;
  const auto serves_max = static_cast<uint64_t>(options.serves_max);
  const bool busy = parts_.counters.serves_in_flight >= serves_max || *unreplied_ >= serves_max ||
                    fetch.pages.size() > static_cast<size_t>(options.fetch_pages_max);
  const TimePoint deadline =
      parts_.clock.Now() + std::chrono::microseconds(std::min(fetch.time_left_us, kTimeLeftMaxUs));
  connection.used = parts_.clock.Now();
  auto serve = std::make_shared<Serve>(parts_.counters, parts_.timers, connection.id, header.fetch,
                                       std::move(fetch), deadline);
  const std::weak_ptr<Serve> weak = serve;
  serve->timer =
      parts_.timers.Add(deadline + options.quarantine_for, [this, weak] { OnStuck(weak); });
  parts_.counters.serves.Add();
  connection.serves.emplace(header.fetch, serve);
  if (busy || parts_.source == nullptr) {
    if (busy) parts_.counters.serves_refused.Add();
    return Refuse(connection, serve, busy ? PageStatus::kBusy : PageStatus::kRefused);
  }
  unreplied_->fetch_add(1);
  parts_.source->Acquire(
      RequestOf(connection, *serve),
      [this, weak, unreplied = unreplied_, inbox = parts_.inbox](SourceResponse response) {
        unreplied->fetch_sub(1);
        // A shared pointer, because a std::function must be copyable.
        auto kept = std::make_shared<SourceResponse>(std::move(response));
        inbox->Post([this, weak, kept] { OnReply(weak, std::move(*kept)); });
      });
  return absl::OkStatus();
}

absl::Status Responder::Refuse(Connection& connection, const std::shared_ptr<Serve>& serve,
                               PageStatus status) {
  // The memory per page: the request, its copy in OutgoingResponse, and the response itself.
  constexpr size_t kPageBytes = 2 * sizeof(FetchBody::Page) + sizeof(SourcePage);
  const uint64_t bytes = sizeof(Serve) + serve->body.pages.size() * kPageBytes;
  serve->refusal_bytes = bytes;
  if (parts_.counters.refusal_bytes.fetch_add(bytes) + bytes >
      parts_.options.refusals_bytes_max.value) {
    parts_.counters.unread_closes.Add();
    return absl::ResourceExhaustedError("the peer sends requests and does not read the replies");
  }
  Respond(connection, serve, AllOf(serve->body, status));
  return absl::OkStatus();
}

void Responder::OnReply(const std::weak_ptr<Serve>& weak, SourceResponse response) {
  const std::shared_ptr<Serve> serve = weak.lock();
  if (!serve || serve->response) return;
  Connection* connection = parts_.host.Find(serve->connection);
  if (connection != nullptr) Respond(*connection, serve, std::move(response));
}

void Responder::Respond(Connection& connection, const std::shared_ptr<Serve>& serve,
                        SourceResponse response) {
  Counters& counters = parts_.counters;
  const size_t frame_bytes = parts_.options.FrameBytes();
  serve->response.emplace(serve->body, std::move(response), frame_bytes);
  if (absl::Status status = serve->response->Check(); !status.ok()) {
    LogError("fragments for {} cannot be sent: {}", connection.address,
             std::string(status.message()));
    serve->response.emplace(serve->body, AllOf(serve->body, PageStatus::kAbsent), frame_bytes);
  }
  const uint64_t bytes = serve->response->tile_bytes_total();
  const uint64_t others = counters.serve_bytes_in_flight;
  // A single fetch is always served, however large it is.
  if (others > 0 && others + bytes > parts_.options.serve_bytes_max.value) {
    counters.serves_refused.Add();
    serve->response.emplace(serve->body, AllOf(serve->body, PageStatus::kBusy), frame_bytes);
  } else {
    serve->bytes = bytes;
    counters.serve_bytes_in_flight.fetch_add(bytes);
  }
  for (const SourcePage& page : serve->response->response().pages) {
    counters.pages_served[static_cast<size_t>(page.status)].Add();
  }
  connection.sending.push_back(serve);
  Pump(connection);
}

// Posts one frame. Returns false if the serve has no frames left.
bool Responder::SendNext(Connection& connection, const std::shared_ptr<Serve>& serve) {
  OutgoingFrame frame;
  if (serve->deadline < parts_.clock.Now() || !serve->response->Next(frame)) return false;
  for (const auto piece : frame.tiles) parts_.counters.bytes_served.Add(piece.size());
  const bool is_response = frame.header.type == FrameType::kResponse;
  if (is_response) ++serve->responses_unsent;
  ++connection.frames_posted;
  connection.Send(std::move(frame), serve->fetch, serve,
                  [this, id = connection.id, weak = std::weak_ptr<Serve>(serve), is_response] {
                    const std::shared_ptr<Serve> kept = is_response ? weak.lock() : nullptr;
                    if (kept) --kept->responses_unsent;
                    OnSent(id);
                  });
  return true;
}

// Closes the connection of a peer that does not read its fetch, because the fetch holds a lease.
void Responder::OnStuck(const std::weak_ptr<Serve>& weak) {
  const std::shared_ptr<Serve> serve = weak.lock();
  if (!serve) return;
  if (Connection* connection = parts_.host.Find(serve->connection)) {
    parts_.counters.forced_closes.Add();
    parts_.host.Break(*connection,
                      absl::DeadlineExceededError("closed by force: not read in time"));
  }
}

void Responder::Pump(Connection& connection) {
  if (std::exchange(connection.pumping, true)) return;
  while (connection.frames_posted < kFramesPostedMax && !connection.sending.empty()) {
    const std::shared_ptr<Serve> serve = connection.sending.front();
    // Later messages may overtake those that wait inside UCX, and tiles must not arrive before
    // their response.
    if (serve->response->responded() && serve->responses_unsent > 0) break;
    if (SendNext(connection, serve)) continue;
    connection.sending.pop_front();
    connection.serves.erase(serve->fetch);
  }
  connection.pumping = false;
}

void Responder::OnSent(uint64_t id) {
  Connection* connection = parts_.host.Find(id);
  if (connection == nullptr) return;
  connection->used = parts_.clock.Now();
  --connection->frames_posted;
  Pump(*connection);
}

void Responder::OnCancel(Connection& connection, const FrameHeader& header) {
  const auto found = connection.serves.find(header.fetch);
  if (found == connection.serves.end()) return;
  std::erase(connection.sending, found->second);
  connection.serves.erase(found);
}

}  // namespace crumb::transport
