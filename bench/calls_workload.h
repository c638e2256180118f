// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"

namespace crumb::bench {

// Clients of one crumbd, each with a connection and a thread of its own, that acquire a prefix in
// host memory and let it go, again and again: what the one thread takes that answers them.
struct CallsWorkload {
  std::string socket_dir;
  std::vector<int> clients = {1, 8, 64};
  int pages = 1600;  // of the prefix
  // Of a prefix that one client more acquires all the time; 0: nobody does.
  int beside_pages = 0;
  Duration duration = std::chrono::seconds(5);  // of each number of clients
};

struct CallsRow {
  int clients = 0;
  int pages = 0;
  int beside_pages = 0;
  size_t calls = 0;  // of `clients`
  size_t busy = 0;   // besides: too many leases of the caller's had not gone back yet
  double calls_per_second = 0;
  double p50_us = 0, p99_us = 0, max_us = 0;  // of one call, without the release
};

// kUnavailable: no crumbd; kNotFound: a page was no hit.
absl::StatusOr<std::vector<CallsRow>> RunCallsWorkload(const CallsWorkload& workload);

std::string CallsText(const std::vector<CallsRow>& rows);
std::string CallsJson(const std::vector<CallsRow>& rows);

}  // namespace crumb::bench
