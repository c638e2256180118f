// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config_visitor.h"

// Bounds on what callers can make crumbd hold or do. Over a bound of size the answer is
// INVALID_ARGUMENT, over one of room RESOURCE_EXHAUSTED at once.
namespace crumb::server {

struct SessionLimits {
  int64_t sessions_max = 256;
  int64_t engines_max = 128;
  int64_t handshakes_max = 64;  // connections that have not said hello
  Duration hello_timeout = std::chrono::seconds(5);
  Duration hello_grace = std::chrono::milliseconds(250);  // before it gives way to others
  // Received descriptors, and sockets of connections that ended, which wait to be closed.
  int64_t closing_max = 1024;        // of one user or tenant
  int64_t closing_total_max = 8192;  // of all of them
  // Descriptors in messages that processes have not read. 0: half of RLIMIT_NOFILE at the start;
  // the kernel refuses to send when a user has more than RLIMIT_NOFILE of them on their way.
  int64_t unread_descriptors_max = 0;
  ByteSize staging_bytes_max{uint64_t{256} << 20};      // of one session
  ByteSize staging_total_bytes_max{uint64_t{4} << 30};  // of all sessions
  int64_t reservations_max = 65'536;                    // of one session
  int64_t lease_pages_max = 65'536;                     // of one engine
  int64_t leases_max = 16'384;                          // of one engine
  std::vector<std::string> allowed_uids;                // besides crumbd's own and root

  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;
};

// Bounds of calls to one crumbd. docs/config.md, "limits", has the effect of each field and what
// happens beyond it. Fields count what their name says (`_max`: at once, or in one call); `_queue`
// counts waiting tasks, or events for one watcher.
struct Limits {
  int64_t requests_max = 4096;
  // Bytes of responses that callers have not read yet: 64 of the longest that gRPC carries by
  // default.
  ByteSize response_bytes_max{uint64_t{256} << 20};
  int64_t acquire_keys_max = 16'384;
  // Fragments that one response names: 16 for each of 16,384 pages, 4 MB of a response.
  int64_t response_fragments_max = 262'144;
  int64_t release_leases_max = 16'384;                 // of one call
  int64_t prefetches_max = 64;                         // under way, of all callers
  int64_t tenant_prefetches_max = 16;                  // under way, of one tenant
  ByteSize device_sums_bytes_max{uint64_t{32} << 20};  // of one Acquire's response
  int64_t commit_fragments_max = 4096;
  int64_t commit_queue = 256;
  int64_t commit_threads = 2;
  int64_t control_queue = 256;
  ByteSize fragment_bytes_max{uint64_t{64} << 20};
  int64_t get_streams = 64;
  int64_t put_streams = 16;
  int64_t put_fragments_max = 65'536;
  ByteSize chunk_bytes{uint64_t{2} << 20};
  int64_t watchers_max = 64;
  int64_t watch_queue = 65'536;
  int64_t watch_snapshot_pages_max = 4'194'304;
  // Pages in the snapshots of all watchers that are not sent yet: some 40 bytes each.
  int64_t watch_snapshot_total_pages_max = 8'388'608;
  int64_t durable_waits_max = 262'144;
  int64_t durable_waits_per_page_max = 1024;
  int64_t notices_max = 65'536;
  int64_t keyspaces_max = 1024;
  int64_t model_labels_max = 32;
  Duration wait_max = std::chrono::seconds(30);
  Duration pin_max = std::chrono::hours(24);
  Duration stream_progress_timeout = std::chrono::seconds(30);  // of Put, Get and WatchEvents
  Duration keyspace_idle_max = std::chrono::hours(24 * 30);
  int64_t connections_max = 1024;         // of gRPC
  int64_t connections_peer_percent = 50;  // of what others leave, for one user or address
  int64_t streams_per_connection = 128;
  ByteSize receive_bytes_max{uint64_t{256} << 20};  // gRPC's buffers of all connections
  Duration handshake_timeout = std::chrono::seconds(10);
  Duration keepalive_interval = std::chrono::seconds(60);
  Duration keepalive_timeout = std::chrono::seconds(20);
  Duration idle_connection = std::chrono::minutes(30);

  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;
};

}  // namespace crumb::server
