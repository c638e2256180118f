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
constexpr CountBounds kCount{.least = 1, .most = int64_t{1} << 20};

}  // namespace

size_t TransportOptions::FrameBytes() const {
  if (frame_bytes.value > 0) return frame_bytes.value;
  const bool tcp_only = ucx_tls.size() == 1 && ucx_tls[0] == "tcp";
  return tcp_only ? segment_bytes.value - kSegmentOverheadBytes : kRendezvousFrameBytes;
}

void TransportOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("listen", listen, "ADDRESS:PORT of one interface for peers; empty: no transport");
  visitor.Field("ucx_tls", ucx_tls, "transports that UCX may use (UCX_TLS); empty: all it finds");
  visitor.Field("segment_bytes", segment_bytes,
                {.least = kSegmentBytesMin, .most = kSegmentBytesMax}, "segments of TCP streams");
  visitor.Field("frame_bytes", frame_bytes, {.most = kFrameBytesMax},
                "tiles of one frame; 0: as many as fit into a segment if ucx_tls is tcp, otherwise "
                "1MiB by rendezvous");
  visitor.Field("connections_max", connections_max, kCount,
                "connections in both directions together");
  visitor.Field("fetches_max", fetches_max, kCount,
                "this node's fetches in flight; more are refused");
  visitor.Field("fetch_pages_max", fetch_pages_max, {.least = 1, .most = kFetchPagesLimit},
                "pages of one fetch");
  visitor.Field("serves_max", serves_max, kCount,
                "peers' fetches in flight; more are refused as busy");
  visitor.Field("refusals_bytes_max", refusals_bytes_max, {.least = kSegmentBytesMax},
                "memory of busy replies that peers have not read; beyond it, a peer that sends "
                "another request is disconnected");
  visitor.Field("serve_bytes_max", serve_bytes_max, {.least = 1},
                "leased tiles being sent; more are refused as busy");
  visitor.Field(
      "quarantine_bytes_max", quarantine_bytes_max, {.least = 1},
      "memory of ended fetches that transfers may still write; beyond it, connections are closed");
  visitor.Field("quarantine_for", quarantine_for, kPositive,
                "time after which the connection of such a transfer is closed");
  visitor.Field("connect_timeout", connect_timeout, kPositive,
                "time in which a peer must respond to a hello");
  visitor.Field("reconnect_after_min", reconnect_after_min, kPositive,
                "pause after a connection failed; doubles each time");
  visitor.Field("reconnect_after_max", reconnect_after_max, {.least = reconnect_after_min},
                "longest pause after failed connections");
  visitor.Field("idle_connection", idle_connection, kPositive,
                "time after which a connection without fetches is closed");
  visitor.Field("poll_for", poll_for, {.most = std::chrono::milliseconds(10)},
                "longest time that the progress thread polls before it sleeps while fetches or "
                "serves are in flight; less if its sleeps are longer");
}

absl::Status TransportOptions::Validate() const { return CheckValues("transport", *this); }

}  // namespace crumb::transport
