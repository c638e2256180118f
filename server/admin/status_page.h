// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "common/recent_log.h"
#include "crumb/v1/cache_service.pb.h"
#include "server/admin/history.h"

namespace crumb::server {

// The content of the status page.
struct StatusView {
  v1::StatsResponse stats;
  v1::ListNodesResponse nodes;
  std::vector<HistorySample> history;  // oldest first
  std::vector<LoggedProblem> problems;
};

// Returns one HTML page without scripts or anything from elsewhere, which loads itself again. All
// text from outside is escaped.
std::string StatusPage(const StatusView& view);

}  // namespace crumb::server
