// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "crumb/v1/cache_service.pb.h"

namespace crumb::server {

// Returns one JSON object of strings, in order. Names and values are escaped.
std::string JsonObject(const std::vector<std::pair<std::string, std::string>>& members);

// Returns the text of /status.json: statistics, with ids in hexadecimal and numbers as numbers, and
// the object `endpoints_json`.
std::string StatusJson(const v1::StatsResponse& stats, const std::string& endpoints_json);

}  // namespace crumb::server
