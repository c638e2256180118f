// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "common/clock.h"
#include "common/metrics.h"
#include "common/mutex.h"

namespace crumb::server {

// The amounts that clients report on their session streams.
enum class Reported : uint8_t {
  kUsedTokens,
  kTokensAvoided,
  kDroppedPages,
  kDeadlines,
  kVerifyFailures,
  kRefusedWindows,
  kScrubbedPages,
  kQualitySamples,
};
inline constexpr int kReportedCount = 8;
// Returns the value of the label `amount` of crumb_tenant_reported_total.
const char* ReportedName(Reported kind);

// Bounds amounts that clients report. crumbd cannot verify them: without a bound one tenant could
// set the counters of the node to anything, or make them wrap. Each tenant has a rate for each kind
// of amount, far above the rate that engines of one node reach, and may accumulate ten minutes of
// it, because clients add up the amounts of a time when crumbd was not running. An amount beyond
// the rate is left out and counted. Accepted amounts are also counted by tenant, so that a tenant
// with false reports can be identified. Thread-safe.
class ReportedAmounts {
 public:
  // Returns how much of `amount` counts.
  uint64_t Admit(const std::string& tenant, Reported kind, uint64_t amount, TimePoint now);

  // Returns the tenant's amounts that counted, by kind.
  std::array<uint64_t, kReportedCount> CountedOf(const std::string& tenant) const;

  // Reports of which a part was left out.
  uint64_t cut() const { return cut_.value(); }

 private:
  struct Allowance {
    double left = 0;
    TimePoint since{};  // zero: full
    uint64_t counted = 0;
  };
  using Allowances = std::array<Allowance, kReportedCount>;

  mutable Mutex mutex_;
  std::unordered_map<std::string, Allowances> tenants_ ABSL_GUARDED_BY(mutex_);
  Counter cut_;
};

}  // namespace crumb::server
