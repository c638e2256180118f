// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/measure.h"
#include "common/config_visitor.h"
#include "nlohmann/json.hpp"

// Workload `store` measures one client thread of a crumbd, per plane and fragment size.
//
//   acquire   (shm) lookup and lease of 1 and of 1,600 resident pages in one call, until a byte of
//             the last page was read; the keys are computed before, and the release is not timed
//   put       shm: copy into staging, commit with crumbd's check of checksums; grpc: streaming Put
//   get       shm: lease, read every byte in place, release; grpc: streaming Get with checksums
//             verified; ucx-tcp: fetch from another process over UCX on the loopback address, one
//             page per call, 1 and 16 calls in flight, checksums verified on arrival; ssd: lease of
//             pages that are only on the SSD tier, until crumbd has verified them and their bytes
//             can be read
//   get-copy  (shm) get with the bytes copied and their checksums verified
//   raw-read  (ssd) O_DIRECT reads at depth 8 of the files that the SSD tier made, in turn with
//             get: fifteen pairs, of which the median ratio is reported
//   idle      CPU time of a crumbd that holds pages and a session and receives no calls
//
// Pages are INT2 fragments of 4,608-byte tiles. CPU seconds are those of all threads of both
// processes. Redis, if requested, moves the same bytes with SET and GET over loopback TCP. Limits
// are measured in the same run, before the processes of `beside_load` start. Figures of put and get
// are medians of three rounds.
namespace crumb::bench {

// One row of the store workload's result. Fields that do not apply are 0 or empty.
struct StoreRow {
  std::string plane;      // shm, ucx-tcp, grpc, ssd, redis, none
  std::string operation;  // acquire, put, get, get-copy, raw-read, idle
  size_t fragment_bytes = 0;
  size_t pages_per_call = 0;
  size_t in_flight = 1;  // concurrent calls
  TimedCalls timed;
  std::string limit;  // the resource that bounds the rate
  double limit_gb_per_s = 0;
  double ratio_to_raw = 0;  // ssd get: median over alternating pairs
  double core_percent = 0;  // idle: percent of one core
};

// All rows of a measurement, and the limits of the machine measured beside them.
struct StoreResult {
  std::vector<StoreRow> rows;
  double memory_read_gb_per_s = 0;
  double memory_copy_gb_per_s = 0;
  double loopback_tcp_gb_per_s = 0;
  size_t beside_load = 0;  // processes that computed beside the rows
};

// Return the result as JSON and as a table.
nlohmann::json StoreJson(const StoreResult& result);
std::string StoreText(const StoreResult& result);

struct StoreWorkloadOptions {
  std::vector<std::string> planes = {"shm", "ucx-tcp", "grpc", "ssd"};
  std::vector<std::string> operations = {"acquire", "put", "get", "idle"};
  std::vector<size_t> fragment_bytes = {128 << 10, 1 << 20};
  double seconds = 2;  // time of every put, get and acquire figure
  double idle_seconds = 10;
  size_t beside_load = 0;  // processes that compute beside every figure, but not beside the limits
  std::string socket_dir;  // a running crumbd; empty: starts one. Plane ssd has none
  std::string crumbd;      // the crumbd to start
  std::string fragment_server;             // crumb-fragment-server, for ucx-tcp
  std::string redis;                       // HOST:PORT, "auto" starts one, empty: no comparison
  ByteSize host_bytes{uint64_t{2} << 30};  // host memory of the started crumbd
  ByteSize ssd_set_bytes{uint64_t{512} << 20};  // bytes that a pair reads

  // kInvalidArgument: a plane or operation is unknown, or planes exclude one another.
  absl::Status Validate() const;
};

// Runs the workload and reports progress to standard error. An interrupt ends it early, with the
// rows so far. kUnavailable: crumbd or Redis cannot be reached or does not start.
absl::StatusOr<StoreResult> RunStoreWorkload(const StoreWorkloadOptions& options);

// Measures the plane `ssd` (ssd_pairs.cc). For each fragment size it fills a crumbd whose host
// memory holds a fraction of the set, waits until everything is durable, and then reads files and
// pages alternately. Adds the rows and their ratio to `result`.
absl::Status RunSsdPairs(const StoreWorkloadOptions& options, StoreResult& result);

}  // namespace crumb::bench
