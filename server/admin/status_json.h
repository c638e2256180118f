// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "crumb/v1/cache_service.pb.h"

namespace crumb::server {

// One JSON object of strings, in order.
std::string JsonObject(const std::vector<std::pair<std::string, std::string>>& members);

// Statistics as JSON: ids in hexadecimal, numbers as numbers.
std::string StatusJson(const v1::StatsResponse& stats, const std::string& endpoints_json);

}  // namespace crumb::server
