// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/history.h"

#include <algorithm>
#include <utility>

namespace crumb::server {

HistorySample SampleOf(TimePoint now, const ModelTokens& tokens, const storage::StoreStats& stats) {
  HistorySample sample;
  sample.when = now;
  for (int tier = 0; tier < kTokenTierCount; ++tier) {
    sample.lookup_tokens[static_cast<size_t>(tier)] = tokens.Total(static_cast<TokenTier>(tier));
  }
  for (const storage::TierStats* tier : {&stats.host, &stats.ssd}) {
    sample.saved_bytes +=
        tier->resident_logical_bytes - std::min(tier->resident_logical_bytes, tier->resident_bytes);
  }
  return sample;
}

History::History(const Options& options, std::function<HistorySample()> take)
    : options_(options),
      take_(std::move(take)),
      samples_{take_()},
      thread_("crumb-history", options.interval, [this] { Add(take_()); }) {}

std::vector<HistorySample> History::Samples() const {
  MutexLock lock(&mutex_);
  return {samples_.begin(), samples_.end()};
}

void History::Add(const HistorySample& sample) {
  MutexLock lock(&mutex_);
  if (samples_.size() == options_.samples_max) samples_.pop_front();
  samples_.push_back(sample);
}

}  // namespace crumb::server
