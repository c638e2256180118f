// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/model_tokens.h"

#include "common/printable.h"

namespace crumb::server {

const char* TokenTierName(TokenTier tier) {
  static constexpr const char* kNames[kTokenTierCount] = {"device", "host", "ssd",
                                                          "remote", "miss", "window"};
  return kNames[static_cast<size_t>(tier)];
}

ModelTokens::ModelTokens(size_t models_max, int64_t part_max_percent)
    : labels_(models_max, part_max_percent) {
  MutexLock lock(&mutex_);
  models_.emplace(kOther, std::make_unique<TokenCounters>());
}

TokenCounters& ModelTokens::Of(const std::string& model, const std::string& tenant) {
  constexpr size_t kLabelBytesMax = 128;
  const std::string label = Printable(model, kLabelBytesMax);
  MutexLock lock(&mutex_);
  const auto found = models_.find(label);
  if (found != models_.end()) return *found->second;
  if (labels_.Take(tenant) != TenantBudget::Taken::kYes) return *models_.at(kOther);
  return *models_.emplace(label, std::make_unique<TokenCounters>()).first->second;
}

void ModelTokens::ForEach(
    const std::function<void(const std::string&, const TokenCounters&)>& visit) const {
  MutexLock lock(&mutex_);
  for (const auto& [model, counters] : models_) visit(model, *counters);
}

uint64_t ModelTokens::Total(TokenTier tier) const {
  uint64_t total = 0;
  ForEach(
      [&](const std::string&, const TokenCounters& counters) { total += counters.value(tier); });
  return total;
}

}  // namespace crumb::server
