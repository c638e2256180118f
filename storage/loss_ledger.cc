// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/loss_ledger.h"

#include <algorithm>

namespace crumb::storage {

void LossLedger::SetOwner(const KeyspaceId& keyspace, const std::string& tenant) {
  MutexLock lock(&mutex_);
  owners_[keyspace] = tenant;
  const auto before = state_.no_owner.find(keyspace);
  if (before == state_.no_owner.end()) return;
  state_.tenants[tenant].pages += before->second;
  state_.no_owner.erase(before);
}

std::optional<std::string> LossLedger::OwnerOf(const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  const auto found = owners_.find(keyspace);
  if (found == owners_.end()) return std::nullopt;
  return found->second;
}

std::vector<KeyspaceId> LossLedger::KeyspacesOf(const std::string& tenant) const {
  MutexLock lock(&mutex_);
  std::vector<KeyspaceId> keyspaces;
  for (const auto& [keyspace, owner] : owners_) {
    if (owner == tenant) keyspaces.push_back(keyspace);
  }
  return keyspaces;
}

void LossLedger::Add(const KeyspaceId& keyspace) {
  MutexLock lock(&mutex_);
  ++state_.all.pages;
  const auto owner = owners_.find(keyspace);
  ++(owner == owners_.end() ? state_.no_owner[keyspace] : state_.tenants[owner->second].pages);
}

LossLedger::Losses LossLedger::LossesOf(const FlushScope& scope) const {
  if (!scope.has_value()) return state_.all;
  const auto found = state_.tenants.find(*scope);
  return found == state_.tenants.end() ? Losses() : found->second;
}

uint64_t LossLedger::Mark(const FlushScope& scope) const {
  MutexLock lock(&mutex_);
  return state_.mark_base + LossesOf(scope).pages;
}

LossLedger::Report LossLedger::ReportSince(const FlushScope& scope, std::optional<uint64_t> since) {
  MutexLock lock(&mutex_);
  const Losses losses = LossesOf(scope);
  Report report;
  report.mark = state_.mark_base + losses.pages;
  if (!since.has_value()) {
    report.pages = losses.pages - losses.reported;
    if (report.pages > 0) {
      (scope.has_value() ? state_.tenants[*scope] : state_.all).reported = losses.pages;
    }
    return report;
  }
  if (*since == kNothingCommitted) return report;
  // Marks of an earlier process are lower than the base, or higher than every mark of this one if
  // the clock was set back since.
  report.foreign_mark = *since < state_.mark_base || *since > report.mark;
  report.pages = report.foreign_mark ? losses.pages : report.mark - *since;
  return report;
}

}  // namespace crumb::storage
