// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config_visitor.h"

namespace crumb::transport {

// The section `transport` of the configuration, described in docs/config.md. Bounds are of one node
// and of one time.
struct TransportOptions {
  std::string listen;  // ADDRESS:PORT of one interface; empty: no transport
  std::vector<std::string> ucx_tls = {
      "tcp"};                         // transports that UCX may use; empty: all that it finds
  ByteSize segment_bytes{256 << 10};  // segments of TCP streams
  ByteSize frame_bytes{0};            // tiles of one frame; 0: see FrameBytes
  int64_t connections_max = 4096;     // sum of both directions; more are refused
  int64_t fetches_max = 1024;         // this node's fetches in flight; more are refused
  int64_t fetch_pages_max = 1024;     // pages of one fetch
  int64_t serves_max = 1024;          // peers' fetches in flight; more get the status busy
  // Memory of busy replies that wait to be sent, on all connections together. Beyond it, a peer
  // that sends another request without reading its replies is disconnected.
  ByteSize refusals_bytes_max{uint64_t{16} << 20};
  ByteSize serve_bytes_max{uint64_t{1}
                           << 30};  // leased tiles that are being sent; more get the status busy
  ByteSize quarantine_bytes_max{uint64_t{1} << 30};    // beyond it, connections are closed by force
  Duration quarantine_for = std::chrono::seconds(10);  // the same after this time
  Duration connect_timeout = std::chrono::seconds(3);
  Duration reconnect_after_min = std::chrono::milliseconds(100);  // doubles up to _max
  Duration reconnect_after_max = std::chrono::seconds(10);
  Duration idle_connection = std::chrono::minutes(10);  // then it is closed
  // The longest time that the progress thread polls before it sleeps while fetches or serves are in
  // flight.
  Duration poll_for = std::chrono::microseconds(200);

  // Returns frame_bytes. If that is 0: the tiles that fit into a segment if TCP is the only
  // transport, otherwise 1 MiB.
  size_t FrameBytes() const;
  void Visit(ConfigVisitor& visitor);
  // Returns kInvalidArgument with the name of the first setting that is out of range.
  absl::Status Validate() const;
};

}  // namespace crumb::transport
