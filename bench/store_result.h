// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "bench/timed_calls.h"
#include "nlohmann/json.hpp"

namespace crumb::bench {

// One line of the store workload's result. Fields that do not apply are 0 or empty.
struct StoreRow {
  std::string plane;      // shm, ucx-tcp, grpc, ssd, redis, none
  std::string operation;  // acquire, put, get, get-copy, raw-read, idle
  size_t fragment_bytes = 0;
  size_t pages_per_call = 0;
  size_t in_flight = 1;  // calls under way at a time
  TimedCalls timed;
  std::string limit;  // the link that bounds it
  double limit_gb_per_s = 0;
  double ratio_to_raw = 0;  // ssd get: median over the interleaved pairs
  double core_percent = 0;  // idle: of one core
};

struct StoreResult {
  std::vector<StoreRow> rows;
  double memory_read_gb_per_s = 0;
  double memory_copy_gb_per_s = 0;
  double loopback_tcp_gb_per_s = 0;
};

nlohmann::json StoreJson(const StoreResult& result);
std::string StoreText(const StoreResult& result);

}  // namespace crumb::bench
