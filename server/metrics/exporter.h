// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>

#include "server/event_hub.h"
#include "server/metrics/server_metrics.h"
#include "server/session/session_table.h"
#include "storage/store_stats.h"

namespace crumb::server {

// What one scrape is made of.
struct Scrape {
  const ServerMetrics& metrics;
  storage::StoreStats store;
  SessionTable::Totals sessions;
  std::array<PageWindows::Reading, PageWindows::kWindows.size()> asked_pages;
  size_t active_keyspaces = 0;
  size_t bf16_keyspaces = 0;
  size_t commit_queue = 0;
  size_t control_queue = 0;
  size_t watchers = 0;
  std::string version;
};

// The Prometheus text format, version 0.0.4. docs/metrics.md lists every series.
std::string ExportText(const Scrape& scrape);

}  // namespace crumb::server
