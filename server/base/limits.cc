// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/limits.h"

#include <charconv>

#include "common/config.h"
#include "common/fragment_header.h"
#include "common/status_macros.h"

namespace crumb::server {
namespace {

absl::Status CheckRange(const char* key, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(key) + " is " + std::to_string(value) +
                                    ", must be from " + std::to_string(least) + " to " +
                                    std::to_string(most));
}

absl::Status CheckBytes(const char* key, ByteSize value, ByteSize least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(key) + " is " + FormatByteSize(value) +
                                    ", must be at least " + FormatByteSize(least));
}

absl::Status CheckPositive(const char* key, Duration value) {
  if (value > Duration::zero()) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(key) + " must be more than 0");
}

// gRPC counts these in milliseconds, in an int.
absl::Status CheckMilliseconds(const char* key, Duration value) {
  if (value >= std::chrono::milliseconds(1) && value <= std::chrono::hours(24 * 24)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(std::string(key) + " must be from 1ms to 576h");
}

// A few of the largest messages at a time.
constexpr uint64_t kReceiveBytesMin = 16 << 20;

// One request of the largest size that gRPC carries by default, in memory.
constexpr uint64_t kRequestBytesMin = 16 << 20;

// One response of the largest size that gRPC carries by default.
constexpr uint64_t kResponseBytesMin = 4 << 20;

// A bound of counts that no caller needs; it keeps sums of limits far from overflow.
constexpr int64_t kCountMax = int64_t{1} << 30;
constexpr int64_t kThreadsMax = 256;
// gRPC's own default bound of a received message; chunks stay well below.
constexpr uint64_t kChunkBytesMax = 3 << 20;
// Clients accept messages of 64 MiB; the rest of the response is small compared with the checksums.
constexpr uint64_t kSumsBytesMax = 56 << 20;

}  // namespace

void SessionLimits::Visit(ConfigVisitor& visitor) {
  visitor.Field("sessions_max", sessions_max, "Processes connected at once.");
  visitor.Field("engines_max", engines_max, "Engines (model replicas) at once.");
  visitor.Field("handshakes_max", handshakes_max,
                "Connections that have not sent their hello yet.");
  visitor.Field("hello_timeout", hello_timeout, "Time for a connection to send its hello.");
  visitor.Field(
      "hello_grace", hello_grace,
      "Time for which a connection without a hello keeps its place while others wait; then "
      "the user with the most of them loses its oldest.");
  visitor.Field("closing_max", closing_max,
                "Descriptors of one user or tenant that wait to be closed, because closing one of "
                "them blocks; with as many its connections end and its hellos are refused.");
  visitor.Field("closing_total_max", closing_total_max,
                "Such descriptors of all users and tenants together; with as many no connection is "
                "accepted until some are closed.");
  visitor.Field("unread_descriptors_max", unread_descriptors_max,
                "Descriptors in messages that processes have not read yet; a user or tenant may "
                "have half of those that others do not have. 0: half of the limit of open files "
                "(RLIMIT_NOFILE) at start.");
  visitor.Field("staging_bytes_max", staging_bytes_max, "Staging memory of one session.");
  visitor.Field("staging_total_bytes_max", staging_total_bytes_max,
                "Staging memory of all sessions together.");
  visitor.Field("reservations_max", reservations_max, "Reservations of one session.");
  visitor.Field("lease_pages_max", lease_pages_max, "Pages that one engine may hold leased.");
  visitor.Field("leases_max", leases_max, "Leases that one engine may hold.");
  visitor.Field("allowed_uids", allowed_uids,
                "Numeric user ids that may open sessions, besides root and crumbd's own.");
}

absl::Status SessionLimits::Validate() const {
  CRUMB_RETURN_IF_ERROR(CheckRange("sessions.sessions_max", sessions_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("sessions.engines_max", engines_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("sessions.handshakes_max", handshakes_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckPositive("sessions.hello_timeout", hello_timeout));
  CRUMB_RETURN_IF_ERROR(CheckPositive("sessions.hello_grace", hello_grace));
  CRUMB_RETURN_IF_ERROR(CheckRange("sessions.closing_max", closing_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("sessions.closing_total_max", closing_total_max, closing_max, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("sessions.unread_descriptors_max", unread_descriptors_max, 0, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("sessions.reservations_max", reservations_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("sessions.lease_pages_max", lease_pages_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("sessions.leases_max", leases_max, 1, kCountMax));
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
  visitor.Field("requests_max", requests_max, "Calls in progress at once, streams included.");
  visitor.Field(
      "request_bytes_max", request_bytes_max,
      "Memory of requests longer than 8 KiB, until their callers have read the responses; "
      "those of Put, Get and Session are not counted.");
  visitor.Field(
      "response_bytes_max", response_bytes_max,
      "Bytes of responses longer than 32 KiB that callers have not read yet; Put, Get and "
      "other streams are not counted.");
  visitor.Field("acquire_keys_max", acquire_keys_max, "Page keys in one call.");
  visitor.Field(
      "response_fragments_max", response_fragments_max,
      "Fragments that one response names; the prefix ends before the page with which there "
      "would be more.");
  visitor.Field("release_leases_max", release_leases_max, "Leases in one Release.");
  visitor.Field("prefetches_max", prefetches_max, "Prefetch calls whose pages are on their way.");
  visitor.Field("tenant_prefetches_max", tenant_prefetches_max,
                "Prefetch calls in progress of one tenant.");
  visitor.Field(
      "device_sums_bytes_max", device_sums_bytes_max,
      "Headers with checksums in one response about pages on devices, which peers' pages need; "
      "the last ones are left out.");
  visitor.Field("commit_fragments_max", commit_fragments_max,
                "Fragments in one Reserve or Commit.");
  visitor.Field("commit_queue", commit_queue, "Commits waiting for a thread.");
  visitor.Field("commit_threads", commit_threads,
                "Threads that copy and verify commits; with tenants those of one tenant, and one "
                "more runs.");
  visitor.Field("control_queue", control_queue,
                "Calls waiting that write records or walk the index.");
  visitor.Field("large_call_queue", large_call_queue,
                "With tenants: calls with requests of more than 8 KiB, Gets and Stats among them, "
                "that wait for a thread.");
  visitor.Field("large_call_threads", large_call_threads,
                "With tenants: threads that serve such calls, one tenant after the other; one "
                "more than one tenant may use is added.");
  visitor.Field("fragment_bytes_max", fragment_bytes_max, "Bytes of one fragment with its header.");
  visitor.Field("get_streams", get_streams, "Get calls at once.");
  visitor.Field("put_streams", put_streams, "Put calls at once; each holds one fragment.");
  visitor.Field("put_fragments_max", put_fragments_max, "Fragments in one Put.");
  visitor.Field("chunk_bytes", chunk_bytes, "Tile bytes in one message of a Get.");
}

void Limits::VisitEventsAndKeyspaces(ConfigVisitor& visitor) {
  visitor.Field("watchers_max", watchers_max, "WatchEvents calls at once.");
  visitor.Field("watch_queue", watch_queue, "Events waiting for one watcher; more are lost.");
  visitor.Field("watch_snapshot_pages_max", watch_snapshot_pages_max,
                "Pages in the snapshot of one watcher.");
  visitor.Field("watch_snapshot_total_pages_max", watch_snapshot_total_pages_max,
                "Pages in the snapshots of all watchers that are not sent yet; each takes some 40 "
                "bytes.");
  visitor.Field("durable_waits_max", durable_waits_max,
                "Committed fragments, by session, that get a notice once they are durable.");
  visitor.Field("durable_waits_per_page_max", durable_waits_per_page_max,
                "Committed fragments of one page that wait for such a notice.");
  visitor.Field("notices_max", notices_max,
                "Notices waiting for one session stream; more are dropped.");
  visitor.Field("notice_bytes_max", notice_bytes_max,
                "Memory of the notices waiting for all session streams; more are dropped.");
  visitor.Field("keyspaces_max", keyspaces_max, "Keyspaces known at once.");
  visitor.Field("model_labels_max", model_labels_max,
                "Distinct values of the metrics label model; further models count as other.");
}

void Limits::Visit(ConfigVisitor& visitor) {
  VisitCalls(visitor);
  VisitEventsAndKeyspaces(visitor);
  visitor.Field("wait_max", wait_max, "Longest time a call waits for lower tiers.");
  visitor.Field("pin_max", pin_max, "Longest time a page can be pinned for.");
  visitor.Field(
      "stream_progress_timeout", stream_progress_timeout,
      "A Put whose caller sends nothing for so long, and a call whose caller does not read the "
      "response, is ended.");
  visitor.Field("keyspace_idle_max", keyspace_idle_max,
                "A keyspace without pages that no call has named for so long is forgotten.");
  VisitConnections(visitor);
}

void Limits::VisitConnections(ConfigVisitor& visitor) {
  visitor.Field("connections_max", connections_max, "Connections of gRPC at once.");
  visitor.Field("connections_peer_percent", connections_peer_percent,
                "Percentage that one user of the Unix socket, or one address of the network, may "
                "have of the connections that others leave.");
  visitor.Field("streams_per_connection", streams_per_connection,
                "Calls in progress on one connection. gRPC holds some 18 KiB for each, from its "
                "headers on.");
  visitor.Field("receive_bytes_max", receive_bytes_max,
                "Memory that gRPC takes for messages and calls of all connections together, those "
                "without a token included; beyond it calls are ended.");
  visitor.Field("handshake_timeout", handshake_timeout,
                "Time for a new connection's TLS and HTTP/2 handshakes.");
  visitor.Field("keepalive_interval", keepalive_interval,
                "A connection that was silent for so long gets a keepalive ping.");
  visitor.Field("keepalive_timeout", keepalive_timeout,
                "A connection that gives no such sign for so long is closed.");
  visitor.Field("idle_connection", idle_connection,
                "A connection without calls is closed after so long; clients connect again.");
}

absl::Status Limits::CheckCalls() const {
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.requests_max", requests_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckBytes("limits.request_bytes_max", request_bytes_max, ByteSize{kRequestBytesMin}));
  CRUMB_RETURN_IF_ERROR(
      CheckBytes("limits.response_bytes_max", response_bytes_max, ByteSize{kResponseBytesMin}));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.acquire_keys_max", acquire_keys_max, 1, 65'536));
  // The first page fits, whatever store.page_fragments_max is.
  CRUMB_RETURN_IF_ERROR(
      CheckRange("limits.response_fragments_max", response_fragments_max, 4096, 4'194'304));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.release_leases_max", release_leases_max, 1, 65'536));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.prefetches_max", prefetches_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("limits.tenant_prefetches_max", tenant_prefetches_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckBytes("limits.device_sums_bytes_max", device_sums_bytes_max, ByteSize{4096}));
  if (device_sums_bytes_max.value > kSumsBytesMax) {
    return absl::InvalidArgumentError("limits.device_sums_bytes_max is " +
                                      FormatByteSize(device_sums_bytes_max) + ", must be at most " +
                                      FormatByteSize(ByteSize{kSumsBytesMax}));
  }
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.commit_fragments_max", commit_fragments_max, 1, 65'536));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.commit_queue", commit_queue, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.commit_threads", commit_threads, 1, kThreadsMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.control_queue", control_queue, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.large_call_queue", large_call_queue, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("limits.large_call_threads", large_call_threads, 1, kThreadsMax));
  CRUMB_RETURN_IF_ERROR(CheckBytes("limits.fragment_bytes_max", fragment_bytes_max,
                                   ByteSize{FragmentHeaderBytes(1) + 1}));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.get_streams", get_streams, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.put_streams", put_streams, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.put_fragments_max", put_fragments_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckBytes("limits.chunk_bytes", chunk_bytes, ByteSize{4096}));
  if (chunk_bytes.value > kChunkBytesMax) {
    return absl::InvalidArgumentError("limits.chunk_bytes is " + FormatByteSize(chunk_bytes) +
                                      ", must be at most " +
                                      FormatByteSize(ByteSize{kChunkBytesMax}));
  }
  return absl::OkStatus();
}

absl::Status Limits::CheckEventsAndKeyspaces() const {
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.watchers_max", watchers_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.watch_queue", watch_queue, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("limits.watch_snapshot_pages_max", watch_snapshot_pages_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.watch_snapshot_total_pages_max",
                                   watch_snapshot_total_pages_max, 1024, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.durable_waits_max", durable_waits_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("limits.durable_waits_per_page_max", durable_waits_per_page_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.notices_max", notices_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckBytes("limits.notice_bytes_max", notice_bytes_max, ByteSize{1 << 20}));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.keyspaces_max", keyspaces_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.model_labels_max", model_labels_max, 1, 1024));
  return absl::OkStatus();
}

absl::Status Limits::Validate() const {
  CRUMB_RETURN_IF_ERROR(CheckCalls());
  CRUMB_RETURN_IF_ERROR(CheckEventsAndKeyspaces());
  CRUMB_RETURN_IF_ERROR(CheckPositive("limits.wait_max", wait_max));
  CRUMB_RETURN_IF_ERROR(CheckPositive("limits.pin_max", pin_max));
  CRUMB_RETURN_IF_ERROR(CheckPositive("limits.stream_progress_timeout", stream_progress_timeout));
  CRUMB_RETURN_IF_ERROR(CheckPositive("limits.keyspace_idle_max", keyspace_idle_max));
  return CheckConnections();
}

absl::Status Limits::CheckConnections() const {
  CRUMB_RETURN_IF_ERROR(CheckRange("limits.connections_max", connections_max, 1, kCountMax));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("limits.connections_peer_percent", connections_peer_percent, 1, 100));
  CRUMB_RETURN_IF_ERROR(
      CheckBytes("limits.receive_bytes_max", receive_bytes_max, ByteSize{kReceiveBytesMin}));
  CRUMB_RETURN_IF_ERROR(CheckMilliseconds("limits.handshake_timeout", handshake_timeout));
  CRUMB_RETURN_IF_ERROR(CheckMilliseconds("limits.keepalive_interval", keepalive_interval));
  CRUMB_RETURN_IF_ERROR(CheckMilliseconds("limits.keepalive_timeout", keepalive_timeout));
  CRUMB_RETURN_IF_ERROR(CheckMilliseconds("limits.idle_connection", idle_connection));
  return CheckRange("limits.streams_per_connection", streams_per_connection, 1, kCountMax);
}

}  // namespace crumb::server
