// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config_visitor.h"

// Bounds on the resources that callers can make crumbd hold or use. A request that exceeds a bound
// of size fails with INVALID_ARGUMENT, one that exceeds a bound of room with RESOURCE_EXHAUSTED, at
// once.
namespace crumb::server {

// Bounds of the processes that share memory with crumbd: the section sessions of the configuration.
// docs/config.md describes the effect of each field. Counts are of one node and of one time.
struct SessionLimits {
  int64_t sessions_max = 256;
  int64_t engines_max = 128;
  int64_t handshakes_max = 64;  // connections that have not said hello
  // A connection without a hello is closed after this time.
  Duration hello_timeout = std::chrono::seconds(5);
  // A connection without a hello keeps its place for this long. After it, a new connection may
  // replace it.
  Duration hello_grace = std::chrono::milliseconds(250);
  // Received descriptors, and sockets of connections that ended, which wait to be closed.
  int64_t closing_max = 1024;        // limit for one user or tenant
  int64_t closing_total_max = 8192;  // limit for all users together
  // Descriptors in messages that processes have not read. 0: half of RLIMIT_NOFILE at the start;
  // the kernel refuses to send when a user has more than RLIMIT_NOFILE of them on their way.
  int64_t unread_descriptors_max = 0;
  ByteSize staging_bytes_max{uint64_t{256} << 20};      // limit for one session
  ByteSize staging_total_bytes_max{uint64_t{4} << 30};  // limit for all sessions
  int64_t reservations_max = 65'536;                    // limit for one session
  int64_t lease_pages_max = 65'536;                     // limit for one engine
  int64_t leases_max = 16'384;                          // limit for one engine
  std::vector<std::string> allowed_uids;                // besides crumbd's own and root

  // Names each field, with its bounds and the text of docs/config.md, to the reader and the printer
  // of configurations.
  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;
};

// Bounds of calls to one crumbd. docs/config.md, "limits", describes the effect of each field and
// the error beyond it. The name of a field says its unit: a number at one time or in one call
// (`_max`), waiting tasks or events for one watcher (`_queue`). With tenants, most bounds of
// numbers at one time also limit one tenant to a part of them (TenantBudget).
struct Limits {
  // Calls in progress, streams included.
  int64_t requests_max = 4096;
  // Memory of requests in progress: 64 of the largest that gRPC takes.
  ByteSize request_bytes_max{uint64_t{256} << 20};
  // Bytes of responses that callers have not read yet: 64 of the longest that gRPC carries by
  // default.
  ByteSize response_bytes_max{uint64_t{256} << 20};
  // Page keys in one call: a prefix of a million tokens.
  int64_t acquire_keys_max = 16'384;
  // Fragments that one response names: 16 for each of 16,384 pages, 4 MB of a response.
  int64_t response_fragments_max = 262'144;
  int64_t release_leases_max = 16'384;  // limit for one call
  int64_t prefetches_max = 64;          // limit of prefetches in progress, for all callers
  int64_t tenant_prefetches_max = 16;   // limit of prefetches in progress, for one tenant
  ByteSize device_sums_bytes_max{uint64_t{32} << 20};  // limit for one Acquire's response
  // Fragments in one Reserve or Commit, and slots in one call about a device pool.
  int64_t commit_fragments_max = 4096;
  // Calls that wait for a thread: Commits and Puts, calls that write records or walk the index,
  // and, with tenants, calls with large requests.
  int64_t commit_queue = 256;
  int64_t commit_threads = 2;
  int64_t control_queue = 256;
  int64_t large_call_queue = 256;  // limit for requests beyond kSmallRequestBytesMax
  int64_t large_call_threads = 2;
  // Size of one fragment with its header.
  ByteSize fragment_bytes_max{uint64_t{64} << 20};
  // Streams in progress, and fragments in one Put.
  int64_t get_streams = 64;
  int64_t put_streams = 16;
  int64_t put_fragments_max = 65'536;
  // Tile bytes in one message of a Get.
  ByteSize chunk_bytes{uint64_t{2} << 20};
  int64_t watchers_max = 64;
  // Events that wait for one watcher; more are lost, and the watcher is notified of the gap.
  int64_t watch_queue = 65'536;
  int64_t watch_snapshot_pages_max = 4'194'304;
  // Pages in the snapshots of all watchers that are not sent yet: some 40 bytes each.
  int64_t watch_snapshot_total_pages_max = 8'388'608;
  // Commits that wait to be durable so that their writer gets a notice: in total and of one page.
  int64_t durable_waits_max = 262'144;
  int64_t durable_waits_per_page_max = 1024;
  // Notices that wait for one session stream; more are dropped.
  int64_t notices_max = 65'536;
  ByteSize notice_bytes_max{uint64_t{64} << 20};  // bytes of notices, all session streams together
  int64_t keyspaces_max = 1024;
  // Values of the metrics' label `model`; further models share "other".
  int64_t model_labels_max = 32;
  // Longest time for which a call waits for lower tiers, and for which a page can be pinned.
  Duration wait_max = std::chrono::seconds(30);
  Duration pin_max = std::chrono::hours(24);
  // Applies to every stream: Put, Get, WatchEvents and the session stream.
  Duration stream_progress_timeout = std::chrono::seconds(30);
  // A keyspace without pages that no call names for so long is forgotten.
  Duration keyspace_idle_max = std::chrono::hours(24 * 30);
  int64_t connections_max = 1024;  // gRPC connections
  // Percentage of those that others do not use, for one user or address.
  int64_t connections_peer_percent = 50;
  int64_t streams_per_connection = 128;
  ByteSize receive_bytes_max{uint64_t{256} << 20};  // gRPC's buffers of all connections
  // Times of gRPC's connections: for the handshakes, until a silent one gets a ping, until a ping
  // without an acknowledgement ends it, and until one without calls is closed.
  Duration handshake_timeout = std::chrono::seconds(10);
  Duration keepalive_interval = std::chrono::seconds(60);
  Duration keepalive_timeout = std::chrono::seconds(20);
  Duration idle_connection = std::chrono::minutes(30);

  void Visit(ConfigVisitor& visitor);
  absl::Status Validate() const;

 private:
  void VisitCalls(ConfigVisitor& visitor);
  void VisitEventsAndKeyspaces(ConfigVisitor& visitor);
  void VisitConnections(ConfigVisitor& visitor);
};

}  // namespace crumb::server
