// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/transport_options.h"

namespace crumb::transport {
namespace {

// The range of segment_bytes: a segment holds at least one tile, and UCX allocates some per
// connection.
constexpr uint64_t kSegmentBytesMin = 8 << 10;
constexpr uint64_t kSegmentBytesMax = 1 << 20;
// Bytes of a TCP segment that are reserved for UCX's headers and the frame header.
constexpr size_t kSegmentOverheadBytes = 1 << 10;
// The default of frame_bytes if frames are transferred by rendezvous (docs/transport.md).
constexpr size_t kRendezvousFrameBytes = 1 << 20;
// The largest frame_bytes, a bound on the memory of one frame.
constexpr uint64_t kFrameBytesMax = 64 << 20;
// The largest fetch_pages_max: kFetchPagesMax in transport/frame.h.
constexpr int64_t kFetchPagesLimit = 8192;
// The largest value of a setting that counts connections, fetches, pages or serves.
constexpr int64_t kCountMax = int64_t{1} << 20;

absl::Status CheckCount(const char* name, int64_t value) {
  if (value >= 1 && value <= kCountMax) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(name) + " must be between 1 and 1048576");
}

}  // namespace

size_t TransportOptions::FrameBytes() const {
  if (frame_bytes.value > 0) return frame_bytes.value;
  const bool tcp_only = ucx_tls.size() == 1 && ucx_tls[0] == "tcp";
  return tcp_only ? segment_bytes.value - kSegmentOverheadBytes : kRendezvousFrameBytes;
}

void TransportOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("listen", listen, "ADDRESS:PORT of one interface for peers; empty: no transport");
  visitor.Field("ucx_tls", ucx_tls, "transports that UCX may use (UCX_TLS); empty: all it finds");
  visitor.Field("segment_bytes", segment_bytes, "segments of TCP streams");
  visitor.Field("frame_bytes", frame_bytes,
                "tiles of one frame; 0: as many as fit into a segment if ucx_tls is tcp, otherwise "
                "1MiB by rendezvous");
  visitor.Field("connections_max", connections_max, "connections in both directions together");
  visitor.Field("fetches_max", fetches_max, "this node's fetches in flight; more are refused");
  visitor.Field("fetch_pages_max", fetch_pages_max, "pages of one fetch");
  visitor.Field("serves_max", serves_max, "peers' fetches in flight; more are refused as busy");
  visitor.Field("refusals_bytes_max", refusals_bytes_max,
                "memory of busy replies that peers have not read; beyond it, a peer that sends "
                "another request is disconnected");
  visitor.Field("serve_bytes_max", serve_bytes_max,
                "leased tiles being sent; more are refused as busy");
  visitor.Field(
      "quarantine_bytes_max", quarantine_bytes_max,
      "memory of ended fetches that transfers may still write; beyond it, connections are closed");
  visitor.Field("quarantine_for", quarantine_for,
                "time after which the connection of such a transfer is closed");
  visitor.Field("connect_timeout", connect_timeout, "time in which a peer must respond to a hello");
  visitor.Field("reconnect_after_min", reconnect_after_min,
                "pause after a connection failed; doubles each time");
  visitor.Field("reconnect_after_max", reconnect_after_max,
                "longest pause after failed connections");
  visitor.Field("idle_connection", idle_connection,
                "time after which a connection without fetches is closed");
  visitor.Field("poll_for", poll_for,
                "longest time that the progress thread polls before it sleeps while fetches or "
                "serves are in flight; less if its sleeps are longer");
}

absl::Status TransportOptions::Validate() const {
  const std::pair<const char*, int64_t> counts[] = {{"transport.connections_max", connections_max},
                                                    {"transport.fetches_max", fetches_max},
                                                    {"transport.fetch_pages_max", fetch_pages_max},
                                                    {"transport.serves_max", serves_max}};
  for (const auto& [name, value] : counts) {
    if (absl::Status status = CheckCount(name, value); !status.ok()) return status;
  }
  if (segment_bytes.value < kSegmentBytesMin || segment_bytes.value > kSegmentBytesMax) {
    return absl::InvalidArgumentError("transport.segment_bytes must be between 8KiB and 1MiB");
  }
  if (frame_bytes.value > kFrameBytesMax) {
    return absl::InvalidArgumentError("transport.frame_bytes must be 64MiB at most");
  }
  if (fetch_pages_max > kFetchPagesLimit) {
    return absl::InvalidArgumentError("transport.fetch_pages_max must be 8192 at most");
  }
  if (refusals_bytes_max.value < kSegmentBytesMax) {
    return absl::InvalidArgumentError("transport.refusals_bytes_max must be at least 1MiB");
  }
  if (serve_bytes_max.value == 0 || quarantine_bytes_max.value == 0) {
    return absl::InvalidArgumentError(
        "transport.serve_bytes_max and transport.quarantine_bytes_max must not be 0");
  }
  if (connect_timeout <= Duration::zero() || quarantine_for <= Duration::zero() ||
      idle_connection <= Duration::zero() || reconnect_after_min <= Duration::zero() ||
      reconnect_after_max < reconnect_after_min) {
    return absl::InvalidArgumentError(
        "transport.connect_timeout, quarantine_for, idle_connection and reconnect_after_min must "
        "be positive and "
        "reconnect_after_max not below reconnect_after_min");
  }
  if (poll_for < Duration::zero() || poll_for > std::chrono::milliseconds(10)) {
    return absl::InvalidArgumentError("transport.poll_for must be between 0 and 10ms");
  }
  return absl::OkStatus();
}

}  // namespace crumb::transport
