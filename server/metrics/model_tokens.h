// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "common/metrics.h"
#include "common/mutex.h"
#include "common/tenant_budget.h"

namespace crumb::server {

// The place where a requested token was found. Every requested token counts in exactly one.
enum class TokenTier : uint8_t { kDevice, kHost, kSsd, kRemote, kMiss, kWindow };
inline constexpr int kTokenTierCount = 6;
// Returns the value of the metrics' label `tier`: "device", "host", "ssd",
// "remote", "miss" or "window".
const char* TokenTierName(TokenTier tier);

// Requested tokens of one value of the label `model`. Thread-safe.
class TokenCounters {
 public:
  void Add(TokenTier tier, uint64_t tokens) { counters_[static_cast<size_t>(tier)].Add(tokens); }
  uint64_t value(TokenTier tier) const { return counters_[static_cast<size_t>(tier)].value(); }

 private:
  std::array<Counter, kTokenTierCount> counters_;
};

// Requested tokens by model, for a bounded number of models: later ones share "other", and so do
// those of a tenant whose models have its part of the labels. Thread-safe.
class ModelTokens {
 public:
  // The label of models over the bound, which is there from the start.
  static constexpr const char* kOther = "other";

  explicit ModelTokens(size_t models_max, int64_t part_max_percent = 100);

  // The counters of `model`, of which this tenant has a keyspace; they live as long as this does.
  TokenCounters& Of(const std::string& model, const std::string& tenant = "");

  // Calls `visit` for each model, in the order of their names, under a lock.
  void ForEach(const std::function<void(const std::string&, const TokenCounters&)>& visit) const;

  // Returns the sum over all models.
  uint64_t Total(TokenTier tier) const;

 private:
  TenantBudget labels_;  // none is ever given back
  mutable Mutex mutex_;
  std::map<std::string, std::unique_ptr<TokenCounters>> models_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
