// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/store_result.h"
#include "common/config_visitor.h"

// Workload `store`: what one client thread gets out of a crumbd, per plane and fragment size.
//
//   acquire   (shm) lookup and lease of 1 and of 1,600 resident pages in one call, keys computed
//             before, until a byte of the last page was read; the release is not timed
//   put       shm: copy into staging, commit with crumbd's check of the sums; grpc: streaming Put
//   get       shm: lease, read every byte where it lies, release; grpc: streaming Get, sums
//             checked; ucx-tcp: fetch from another process over UCX on the loopback address, one
//             page a call, one call and 16 calls in flight, sums verified on arrival; ssd: lease of
//             pages that lie on the SSD tier only, until crumbd has checked them and their bytes
//             can be read
//   get-copy  (shm) get, with the bytes copied out and their sums checked
//   raw-read  (ssd) O_DIRECT reads at depth 8 of the files that the SSD tier made, in turn with
//             get: fifteen pairs, of which the median ratio is reported
//   idle      CPU time of a crumbd that holds pages and a session and is asked nothing
//
// Pages are INT2 fragments of 4,608-byte tiles. CPU seconds are those of all threads of both
// processes. Redis, when asked for, moves the same bytes with SET and GET over loopback TCP. Limits
// are measured in the same run. Figures of put and get are the median of three rounds.
namespace crumb::bench {

struct StoreWorkloadOptions {
  std::vector<std::string> planes = {"shm", "ucx-tcp", "grpc", "ssd"};
  std::vector<std::string> operations = {"acquire", "put", "get", "idle"};
  std::vector<size_t> fragment_bytes = {128 << 10, 1 << 20};
  double seconds = 2;  // of every put, get and acquire figure
  double idle_seconds = 10;
  std::string socket_dir;       // of a running crumbd; empty: one is started. Not for ssd
  std::string crumbd;           // the program to start
  std::string fragment_server;  // crumb-fragment-server, for ucx-tcp
  std::string redis;            // HOST:PORT, "auto" starts one, empty: no comparison
  ByteSize host_bytes{uint64_t{2} << 30};       // of the crumbd that is started
  ByteSize ssd_set_bytes{uint64_t{512} << 20};  // what is read per pair

  // kInvalidArgument: an unknown plane or operation, or a plane that the others exclude.
  absl::Status Validate() const;
};

// Progress goes to standard error. Ends early, with what there is, on an interrupt. kUnavailable:
// crumbd or Redis is not there or does not start.
absl::StatusOr<StoreResult> RunStoreWorkload(const StoreWorkloadOptions& options);

}  // namespace crumb::bench
