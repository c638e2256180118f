// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/reported_amounts.h"

#include <algorithm>

namespace crumb::server {
namespace {

// Amounts a second, by kind: ten million tokens are more than a node's network and disks bring in a
// second; a page has 32 tokens or more.
constexpr std::array<double, kReportedCount> kPerSecond = {1e7, 1e7, 3e5, 1e4, 3e5, 3e5, 3e5, 1e4};
constexpr double kSecondsSaved = 600;
// Tenants whose allowances are kept. Beyond it all begin with full ones, and counts of 0, again:
// the file of tenants was replaced many times.
constexpr size_t kTenantsMax = 65'536;

}  // namespace

const char* ReportedName(Reported kind) {
  static constexpr std::array<const char*, kReportedCount> kNames = {
      "used_tokens",     "prefill_tokens_avoided", "publish_dropped_pages", "deadline_exceeded",
      "verify_failures", "windows_refused",        "scrubbed_pages",        "quality_samples"};
  return kNames[static_cast<size_t>(kind)];
}

std::array<uint64_t, kReportedCount> ReportedAmounts::CountedOf(const std::string& tenant) const {
  std::array<uint64_t, kReportedCount> counted{};
  MutexLock lock(&mutex_);
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return counted;
  for (size_t i = 0; i < counted.size(); ++i) counted[i] = found->second[i].counted;
  return counted;
}

uint64_t ReportedAmounts::Admit(const std::string& tenant, Reported kind, uint64_t amount,
                                TimePoint now) {
  if (amount == 0) return 0;
  const auto index = static_cast<size_t>(kind);
  const double most = kPerSecond[index] * kSecondsSaved;
  MutexLock lock(&mutex_);
  if (tenants_.size() > kTenantsMax) tenants_.clear();
  Allowance& allowance = tenants_[tenant][index];
  if (allowance.since == TimePoint()) {
    allowance = {most, now, 0};
  } else if (now > allowance.since) {
    const double seconds = std::chrono::duration<double>(now - allowance.since).count();
    allowance.left = std::min(most, allowance.left + seconds * kPerSecond[index]);
    allowance.since = now;
  }
  // Compared as floating point: `amount` may be larger than any allowance.
  const uint64_t counted = static_cast<double>(amount) <= allowance.left
                               ? amount
                               : static_cast<uint64_t>(allowance.left);
  allowance.left -= static_cast<double>(counted);
  allowance.counted += counted;
  if (counted < amount) cut_.Add();
  return counted;
}

}  // namespace crumb::server
