// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/loss_ledger.h"

#include <algorithm>

namespace crumb::storage {

void LossLedger::SetOwner(const KeyspaceId& keyspace, const std::string& tenant) {
  owners_[keyspace] = tenant;
  const auto before = state_.no_owner.find(keyspace);
  if (before == state_.no_owner.end()) return;
  state_.tenants[tenant].pages += before->second;
  state_.no_owner.erase(before);
}

const std::string* LossLedger::OwnerOf(const KeyspaceId& keyspace) const {
  const auto found = owners_.find(keyspace);
  return found == owners_.end() ? nullptr : &found->second;
}

std::vector<KeyspaceId> LossLedger::KeyspacesOf(const std::string& tenant) const {
  std::vector<KeyspaceId> keyspaces;
  for (const auto& [keyspace, owner] : owners_) {
    if (owner == tenant) keyspaces.push_back(keyspace);
  }
  return keyspaces;
}

void LossLedger::Add(const KeyspaceId& keyspace) {
  ++state_.all.pages;
  if (const std::string* const owner = OwnerOf(keyspace)) {
    ++state_.tenants[*owner].pages;
  } else {
    ++state_.no_owner[keyspace];
  }
}

LossLedger::Losses LossLedger::LossesOf(const FlushScope& scope) const {
  if (!scope.has_value()) return state_.all;
  const auto found = state_.tenants.find(*scope);
  return found == state_.tenants.end() ? Losses() : found->second;
}

uint64_t LossLedger::Mark(const FlushScope& scope) const {
  return state_.mark_base + LossesOf(scope).pages;
}

LossLedger::Report LossLedger::ReportSince(const FlushScope& scope, std::optional<uint64_t> since) {
  const Losses losses = LossesOf(scope);
  Report report;
  report.mark = Mark(scope);
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
