// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/config_visitor.h"

namespace crumb::server {

// The admin port: section `admin` of crumbd.yaml, described in docs/config.md.
struct AdminOptions {
  std::string listen = "127.0.0.1:9464";  // HOST:PORT; empty: no admin port
  // Threads that make responses.
  int64_t threads = 2;
  // Connections at one time; more wait in the backlog.
  int64_t connections_max = 64;
  // Time for a caller to send its request, and again to read the response.
  Duration read_timeout = std::chrono::seconds(5);
  // Time between two points of the status page's charts, and the number of points that are kept.
  Duration history_interval = std::chrono::seconds(10);
  int64_t history_samples_max = 360;

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming key and bound.
  absl::Status Validate() const;
};

}  // namespace crumb::server
