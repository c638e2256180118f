// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "crumb/cache_stats.h"
#include "nlohmann/json.hpp"

// The statistics, nodes and pages of crumbd, as text and as JSON.
namespace crumb::tools {

// Tokens that lookups requested since the start, without recent windows, and those that hit.
struct HitRates {
  uint64_t requested_tokens = 0;
  uint64_t hit_tokens = 0;
};

// Returns the sums over the labels of lookup_tokens: all but "miss" are hits, and "window" counts
// in neither.
HitRates HitRatesOf(const client::CacheStats& stats);

// Returns the BF16 bytes of all held pages over their stored bytes; 0 if there are no pages.
double BytesSavedFactor(const client::CacheStats& stats);

// Returns "serving", or "degraded: " and the states of the tiers that are not active.
std::string HealthOf(const client::CacheStats& stats);

// Returns "active", "bf16" or "unknown".
std::string StateName(client::KeyspaceState state);

// The output of `crumb status`: health, tiers and keyspaces.
std::string StatusText(const client::CacheStats& stats);
nlohmann::json StatusJson(const client::CacheStats& stats);

// The output of `crumb stats`: tiers, hit rates, bytes saved and all counters.
std::string StatsText(const client::CacheStats& stats);
nlohmann::json StatsJson(const client::CacheStats& stats);

// The output of `crumb nodes` and `crumb where`.

std::string NodesText(const client::NodeList& list);
nlohmann::json NodesJson(const client::NodeList& list);

std::string PlaceText(const client::PageLocation& place);
nlohmann::json PlaceJson(const client::PageLocation& place);

}  // namespace crumb::tools
