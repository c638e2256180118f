// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config_visitor.h"

namespace crumb::transport {

// docs/config.md, section transport.
struct TransportOptions {
  std::string listen;                          // ADDRESS:PORT of one interface; empty: none
  std::vector<std::string> ucx_tls = {"tcp"};  // UCX transports; empty: all that UCX finds
  ByteSize segment_bytes{256 << 10};           // of TCP streams
  ByteSize frame_bytes{0};                     // of tiles; 0: see FrameBytes
  int64_t connections_max = 4096;              // both ways together; more are refused
  int64_t fetches_max = 1024;                  // own fetches under way; more are refused
  int64_t fetch_pages_max = 1024;              // pages of one fetch
  int64_t serves_max = 1024;                   // peers' fetches under way; more are answered busy
  // Memory of busy answers that wait to be sent, of all connections. A peer that goes on asking and
  // does not read them is disconnected beyond it.
  ByteSize refusals_bytes_max{uint64_t{16} << 20};
  ByteSize serve_bytes_max{uint64_t{1}
                           << 30};  // of leased tiles being sent; more are answered busy
  ByteSize quarantine_bytes_max{uint64_t{1} << 30};    // then connections are closed by force
  Duration quarantine_for = std::chrono::seconds(10);  // then, too
  Duration connect_timeout = std::chrono::seconds(3);
  Duration reconnect_after_min = std::chrono::milliseconds(100);  // doubles up to _max
  Duration reconnect_after_max = std::chrono::seconds(10);
  Duration idle_connection = std::chrono::minutes(10);  // then it is closed
  // Before sleep, at most, while fetches or serves are under way.
  Duration poll_for = std::chrono::microseconds(200);

  // frame_bytes, or what 0 stands for: what a segment takes over TCP only, else 1 MiB.
  size_t FrameBytes() const;
  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming the first setting that is out of range.
  absl::Status Validate() const;
};

}  // namespace crumb::transport
