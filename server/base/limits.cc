// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/limits.h"

#include <charconv>

#include "common/config_visitor.h"
#include "common/fragment_header.h"
#include "common/status_macros.h"

namespace crumb::server {
namespace {

// A bound of counts that no caller needs; it keeps sums of limits far from overflow.
constexpr int64_t kCountMax = int64_t{1} << 30;
constexpr CountBounds kCount{.least = 1, .most = kCountMax};
constexpr int64_t kThreadsMax = 256;
// gRPC counts these times in milliseconds, in an int.
constexpr DurationBounds kGrpcTime{.least = std::chrono::milliseconds(1),
                                   .most = std::chrono::hours(24 * 24)};

// A few of the largest messages at a time.
constexpr uint64_t kReceiveBytesMin = 16 << 20;

// One request of the largest size that gRPC carries by default, in memory.
constexpr uint64_t kRequestBytesMin = 16 << 20;

// One response of the largest size that gRPC carries by default.
constexpr uint64_t kResponseBytesMin = 4 << 20;

// gRPC's own default bound of a received message; chunks stay well below.
constexpr uint64_t kChunkBytesMax = 3 << 20;
// Clients accept messages of 64 MiB; the rest of the response is small compared with the checksums.
constexpr uint64_t kSumsBytesMax = 56 << 20;

}  // namespace

void SessionLimits::Visit(ConfigVisitor& visitor) {
  visitor.Field("sessions_max", sessions_max, kCount, "Processes connected at once.");
  visitor.Field("engines_max", engines_max, kCount, "Engines (model replicas) at once.");
  visitor.Field("handshakes_max", handshakes_max, kCount,
                "Connections that have not sent their hello yet.");
  visitor.Field("hello_timeout", hello_timeout, kPositive,
                "Time for a connection to send its hello.");
  visitor.Field(
      "hello_grace", hello_grace, kPositive,
      "Time for which a connection without a hello keeps its place while others wait; then "
      "the user with the most of them loses its oldest.");
  visitor.Field("closing_max", closing_max, kCount,
                "Descriptors of one user or tenant that wait to be closed, because closing one of "
                "them blocks; with as many its connections end and its hellos are refused.");
  visitor.Field("closing_total_max", closing_total_max, {.least = closing_max, .most = kCountMax},
                "Such descriptors of all users and tenants together; with as many no connection is "
                "accepted until some are closed.");
  visitor.Field("unread_descriptors_max", unread_descriptors_max, {.least = 0, .most = kCountMax},
                "Descriptors in messages that processes have not read yet; a user or tenant may "
                "have half of those that others do not have. 0: half of the limit of open files "
                "(RLIMIT_NOFILE) at start.");
  visitor.Field("staging_bytes_max", staging_bytes_max, "Staging memory of one session.");
  visitor.Field("staging_total_bytes_max", staging_total_bytes_max,
                "Staging memory of all sessions together.");
  visitor.Field("reservations_max", reservations_max, kCount, "Reservations of one session.");
  visitor.Field("lease_pages_max", lease_pages_max, kCount,
                "Pages that one engine may hold leased.");
  visitor.Field("leases_max", leases_max, kCount, "Leases that one engine may hold.");
  visitor.Field("allowed_uids", allowed_uids,
                "Numeric user ids that may open sessions, besides root and crumbd's own.");
}

absl::Status SessionLimits::Validate() const {
  CRUMB_RETURN_IF_ERROR(CheckValues("sessions", *this));
  for (const std::string& uid : allowed_uids) {
    uint32_t number = 0;
    const auto [end, error] = std::from_chars(uid.data(), uid.data() + uid.size(), number);
    if (error != std::errc() || end != uid.data() + uid.size()) {
      return absl::InvalidArgumentError("sessions.allowed_uids: '" + uid +
                                        "' is no numeric user id");
    }
  }
  return absl::OkStatus();
}

void Limits::VisitCalls(ConfigVisitor& visitor) {
  visitor.Field("requests_max", requests_max, kCount,
                "Calls in progress at once, streams included.");
  visitor.Field(
      "request_bytes_max", request_bytes_max, {.least = kRequestBytesMin},
      "Memory of requests longer than 8 KiB, until their calls end or, of a Get, its pages are "
      "leased; those of the streams Put, WatchEvents and Session are not counted.");
  visitor.Field(
      "response_bytes_max", response_bytes_max, {.least = kResponseBytesMin},
      "Bytes of responses longer than 32 KiB that callers have not read yet; Put, Get and "
      "other streams are not counted.");
  visitor.Field("acquire_keys_max", acquire_keys_max, {.least = 1, .most = 65'536},
                "Page keys in one call.");
  // The first page fits, whatever store.page_fragments_max is.
  visitor.Field(
      "response_fragments_max", response_fragments_max, {.least = 4096, .most = 4'194'304},
      "Fragments that one response names; the prefix ends before the page with which there "
      "would be more.");
  visitor.Field("release_leases_max", release_leases_max, {.least = 1, .most = 65'536},
                "Leases in one Release.");
  visitor.Field("prefetches_max", prefetches_max, kCount,
                "Prefetch calls whose pages are on their way.");
  visitor.Field("tenant_prefetches_max", tenant_prefetches_max, kCount,
                "Prefetch calls in progress of one tenant.");
  visitor.Field(
      "device_sums_bytes_max", device_sums_bytes_max, {.least = 4096, .most = kSumsBytesMax},
      "Headers with checksums in one response about pages on devices, which peers' pages need; "
      "the last ones are left out.");
  visitor.Field("commit_fragments_max", commit_fragments_max, {.least = 1, .most = 65'536},
                "Fragments in one Reserve or Commit.");
  visitor.Field("commit_queue", commit_queue, kCount, "Commits waiting for a thread.");
  visitor.Field("commit_threads", commit_threads, {.least = 1, .most = kThreadsMax},
                "Threads that copy and verify commits; with tenants those of one tenant, and one "
                "more runs.");
  visitor.Field("control_queue", control_queue, kCount,
                "Calls waiting that write records or walk the index.");
  visitor.Field("large_call_queue", large_call_queue, kCount,
                "With tenants: calls with requests of more than 8 KiB, Gets and Stats among them, "
                "that wait for a thread.");
  visitor.Field("large_call_threads", large_call_threads, {.least = 1, .most = kThreadsMax},
                "With tenants: threads that serve such calls, one tenant after the other; one "
                "more than one tenant may use is added.");
  visitor.Field("fragment_bytes_max", fragment_bytes_max, {.least = FragmentHeaderBytes(1) + 1},
                "Bytes of one fragment with its header.");
  visitor.Field("get_streams", get_streams, kCount, "Get calls at once.");
  visitor.Field("put_streams", put_streams, kCount, "Put calls at once; each holds one fragment.");
  visitor.Field("put_fragments_max", put_fragments_max, kCount, "Fragments in one Put.");
  visitor.Field("chunk_bytes", chunk_bytes, {.least = 4096, .most = kChunkBytesMax},
                "Tile bytes in one message of a Get.");
}

void Limits::VisitEventsAndKeyspaces(ConfigVisitor& visitor) {
  visitor.Field("watchers_max", watchers_max, kCount, "WatchEvents calls at once.");
  visitor.Field("watch_queue", watch_queue, kCount,
                "Events waiting for one watcher; more are lost.");
  visitor.Field("watch_snapshot_pages_max", watch_snapshot_pages_max, kCount,
                "Pages in the snapshot of one watcher.");
  visitor.Field("watch_snapshot_total_pages_max", watch_snapshot_total_pages_max,
                {.least = 1024, .most = kCountMax},
                "Pages in the snapshots of all watchers that are not sent yet; each takes some 40 "
                "bytes.");
  visitor.Field("durable_waits_max", durable_waits_max, kCount,
                "Committed fragments, by session, that get a notice once they are durable.");
  visitor.Field("durable_waits_per_page_max", durable_waits_per_page_max, kCount,
                "Committed fragments of one page that wait for such a notice.");
  visitor.Field("notices_max", notices_max, kCount,
                "Notices waiting for one session stream; more are dropped.");
  visitor.Field("notice_bytes_max", notice_bytes_max, {.least = 1 << 20},
                "Memory of the notices waiting for all session streams; more are dropped.");
  visitor.Field("keyspaces_max", keyspaces_max, kCount, "Keyspaces known at once.");
  visitor.Field("model_labels_max", model_labels_max, {.least = 1, .most = 1024},
                "Distinct values of the metrics label model; further models count as other.");
}

void Limits::Visit(ConfigVisitor& visitor) {
  VisitCalls(visitor);
  VisitEventsAndKeyspaces(visitor);
  visitor.Field("wait_max", wait_max, kPositive, "Longest time a call waits for lower tiers.");
  visitor.Field("pin_max", pin_max, kPositive, "Longest time a page can be pinned for.");
  visitor.Field(
      "stream_progress_timeout", stream_progress_timeout, kPositive,
      "A Put whose caller sends nothing for so long, and a call whose caller does not read the "
      "response, is ended.");
  visitor.Field("keyspace_idle_max", keyspace_idle_max, kPositive,
                "A keyspace without pages that no call has named for so long is forgotten.");
  VisitConnections(visitor);
}

void Limits::VisitConnections(ConfigVisitor& visitor) {
  visitor.Field("connections_max", connections_max, kCount, "Connections of gRPC at once.");
  visitor.Field("connections_peer_percent", connections_peer_percent, {.least = 1, .most = 100},
                "Percentage that one user of the Unix socket, or one address of the network, may "
                "have of the connections that others leave.");
  visitor.Field("streams_per_connection", streams_per_connection, kCount,
                "Calls in progress on one connection. gRPC holds some 18 KiB for each, from its "
                "headers on.");
  visitor.Field("receive_bytes_max", receive_bytes_max, {.least = kReceiveBytesMin},
                "Memory that gRPC takes for messages and calls of all connections together, those "
                "without a token included; beyond it calls are ended.");
  visitor.Field("handshake_timeout", handshake_timeout, kGrpcTime,
                "Time for a new connection's TLS and HTTP/2 handshakes.");
  visitor.Field("keepalive_interval", keepalive_interval, kGrpcTime,
                "A connection that was silent for so long gets a keepalive ping.");
  visitor.Field("keepalive_timeout", keepalive_timeout, kGrpcTime,
                "A connection that gives no such sign for so long is closed.");
  visitor.Field("idle_connection", idle_connection, kGrpcTime,
                "A connection without calls is closed after so long; clients connect again.");
}

absl::Status Limits::Validate() const { return CheckValues("limits", *this); }

}  // namespace crumb::server
