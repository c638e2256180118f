// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"

namespace crumb::bench {

// Clients of one crumbd, each with a connection and a thread, acquire a prefix in host memory and
// release it, repeatedly. The figures show the cost of crumbd's single thread that serves their
// calls.
struct CallsWorkload {
  std::string socket_dir;
  std::vector<int> clients = {1, 8, 64};
  int pages = 1600;      // pages of the prefix
  int beside_pages = 0;  // pages of a prefix that one more client acquires all the time; 0: none
  Duration duration = std::chrono::seconds(5);  // duration for each number of clients
};

// The figures of one number of clients.
struct CallsRow {
  int clients = 0;
  int pages = 0;
  int beside_pages = 0;
  size_t calls = 0;  // successful calls of all clients
  size_t busy = 0;   // calls that were refused because the caller had too many leases
  double calls_per_second = 0;
  double p50_us = 0, p99_us = 0, max_us = 0;  // times of one call, without the release
};

// kUnavailable: crumbd cannot be reached; kNotFound: a page did not hit.
absl::StatusOr<std::vector<CallsRow>> RunCallsWorkload(const CallsWorkload& workload);

// Return the rows as a table and as a JSON array.
std::string CallsText(const std::vector<CallsRow>& rows);
std::string CallsJson(const std::vector<CallsRow>& rows);

}  // namespace crumb::bench
