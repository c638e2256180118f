// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "crumb/v1/cache_service.pb.h"
#include "nlohmann/json_fwd.hpp"

// crumbd's numbers as text for people and as JSON for programs.
namespace crumb::tools {

// Tokens asked for by lookups since the start, the recent window left out, and where they were.
struct HitRates {
  uint64_t requested_tokens = 0;
  uint64_t hit_tokens = 0;
};

HitRates HitRatesOf(const v1::StatsResponse& stats);

// BF16 bytes over stored bytes of all pages held; 0 when nothing is held.
double BytesSavedFactor(const v1::StatsResponse& stats);

std::string StatusText(const std::string& health, const v1::StatsResponse& stats);
nlohmann::json StatusJson(const std::string& health, const v1::StatsResponse& stats);

std::string StatsText(const v1::StatsResponse& stats);
nlohmann::json StatsJson(const v1::StatsResponse& stats);

}  // namespace crumb::tools
