// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "crumb/cache_stats.h"
#include "nlohmann/json_fwd.hpp"

// crumbd's numbers as text for people and as JSON for programs.
namespace crumb::tools {

// Tokens asked for by lookups since the start, the recent window left out, and where they were.
struct HitRates {
  uint64_t requested_tokens = 0;
  uint64_t hit_tokens = 0;
};

HitRates HitRatesOf(const client::CacheStats& stats);

// BF16 bytes over stored bytes of all pages held; 0 when nothing is held.
double BytesSavedFactor(const client::CacheStats& stats);

// "serving", or "degraded: " and the state of the tiers that are not active.
std::string HealthOf(const client::CacheStats& stats);

std::string StateName(client::KeyspaceState state);

std::string StatusText(const client::CacheStats& stats);
nlohmann::json StatusJson(const client::CacheStats& stats);

std::string StatsText(const client::CacheStats& stats);
nlohmann::json StatsJson(const client::CacheStats& stats);

}  // namespace crumb::tools
