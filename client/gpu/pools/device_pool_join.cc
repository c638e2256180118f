// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <utility>

#include "client/gpu/pools/device_pool.h"
#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Number of lost connections that are not settled yet.
constexpr size_t kFormerMax = 16;

}  // namespace

void DevicePool::JoinAgain() {
  {
    MutexLock lock(&mutex_);
    if (!join_due_ && session_ != nullptr && session_->connected()) return;
    join_due_ = false;
    if (session_ != nullptr) {
      // Ready slots are not in use; slots that the caller holds are released when it drops them.
      session_->ReleaseLater(stock_);
      AddFormer(std::exchange(session_, nullptr));
    }
    stock_.clear();
    demotions_.clear();
  }
  const absl::Status joined = Join();
  if (joined.ok()) {
    failure_logged_ = false;
  } else if (!absl::IsUnavailable(joined) && !std::exchange(failure_logged_, true)) {
    LogWarning("no device pool, going on without: {}", joined.ToString());
  }
}

void DevicePool::AddFormer(std::shared_ptr<PoolSession> session) {
  if (former_.size() >= kFormerMax) former_.pop_front();
  former_.push_back(std::move(session));
}

// crumbd may have granted a Reserve or Claim whose response was lost with its connection. A slot
// that was reserved over a former connection is used only if it has a record: there is a new
// session, and a late caller notices that under the lock.
void DevicePool::SettleFormer() {
  std::vector<std::pair<std::shared_ptr<PoolSession>, std::vector<uint64_t>>> due;
  {
    MutexLock lock(&mutex_);
    if (session_ == nullptr) return;
    for (const auto& former : std::exchange(former_, {})) {
      // A restarted crumbd learned of the held slots by claims.
      const bool same = former->epoch() == session_->epoch();
      if (same && former->holder() != session_->holder()) due.push_back({former, {}});
    }
    records_.ForEach([&](uint64_t slot, const SlotRecord& record) {
      for (auto& [former, slots] : due) {
        if (record.held_by != nullptr && record.held_by->holder() == former->holder()) {
          slots.push_back(slot);
        }
      }
    });
  }
  for (const auto& [former, slots] : due) {
    const absl::Status released = former->ReleaseAllBut(slots);
    const bool again = absl::IsUnavailable(released) || absl::IsDeadlineExceeded(released);
    if (again) AddFormer(former);
  }
}

absl::Status DevicePool::Join() {
  PoolJoin request = {.name = name_};
  {
    MutexLock lock(&mutex_);
    request.known = known_;
  }
  request.roster_fd = mark_.roster();
  CRUMB_ASSIGN_OR_RETURN(JoinedPool joined, link_.Join(request));
  absl::Status part = StartSession(joined.session, std::move(joined.roster));
  // crumbd may record slots as held that were not reported.
  if (!part.ok()) AddFormer(std::move(joined.session));
  return part;
}

absl::Status DevicePool::StartSession(const std::shared_ptr<PoolSession>& session,
                                      UniqueFd roster) {
  bool first;
  {
    MutexLock lock(&mutex_);
    first = known_ == PoolId();
  }
  std::vector<PoolHandle> handles = session->TakeFirstHandles();
  if (first) {
    CRUMB_ASSIGN_OR_RETURN(mark_, RosterMark::Take(roster.get()));
    MutexLock lock(&mutex_);
    known_ = session->id();
    epoch_ = session->epoch();
  } else {
    CRUMB_RETURN_IF_ERROR(range_->OfferAll(*session, handles));
    // crumbd knows the held slots unless the pool was created again.
    absl::Status claimed = ClaimAll(session);
    if (!claimed.ok() && !absl::IsFailedPrecondition(claimed)) return claimed;
  }
  CRUMB_RETURN_IF_ERROR(range_->MapAll(std::move(handles)));
  CRUMB_RETURN_IF_ERROR(session->ReportMark(mark_.byte()));
  device_full_ = !range_->Grow(*session);
  MutexLock lock(&mutex_);
  session_ = session;
  return absl::OkStatus();
}

// Claims the slots that the caller holds, keyspace by keyspace.
absl::Status DevicePool::ClaimAll(const std::shared_ptr<PoolSession>& session) {
  std::map<KeyspaceId, std::vector<SlotClaim>> claims;
  {
    MutexLock lock(&mutex_);
    epoch_ = session->epoch();
    records_.ForEach([&](uint64_t slot, const SlotRecord& record) {
      std::optional<FragmentHeader> header;
      if (record.header != nullptr) {
        header = *record.header;
      } else if (auto decoded = DecodeFragmentHeader(record.encoded_header); decoded.ok()) {
        header = *std::move(decoded);
      }
      claims[header.has_value() ? header->keyspace : KeyspaceId()].push_back(
          {slot, std::move(header)});
    });
  }
  for (const auto& [keyspace, slots] : claims) {
    absl::StatusOr<std::vector<bool>> claimed = session->Claim(keyspace, slots);
    // The keyspace is not open yet: the slots stay held, their pages are lost to others.
    if (absl::IsNotFound(claimed.status())) claimed = std::vector<bool>(slots.size());
    CRUMB_RETURN_IF_ERROR(claimed.status());
    CRUMB_RETURN_IF_ERROR(ClaimWithoutHeaders(*session, slots, &*claimed));
    MutexLock lock(&mutex_);
    std::vector<uint64_t> not_needed;
    for (size_t i = 0; i < slots.size(); ++i) {
      if (!(*claimed)[i]) continue;
      SlotRecord* record = records_.Find(slots[i].slot);
      if (record == nullptr) {
        not_needed.push_back(slots[i].slot);  // released meanwhile
        continue;
      }
      const std::shared_ptr<PoolSession> former = std::exchange(record->held_by, session);
      ++stats_.slots_reclaimed;
      // A slot claimed from the same crumbd over a lost connection would be held twice.
      if (former == nullptr || former->epoch() != session->epoch()) continue;
      if (former->holder() != session->holder()) former->ReleaseLater({&slots[i].slot, 1});
    }
    session->ReleaseLater(not_needed);
  }
  return absl::OkStatus();
}

absl::Status DevicePool::ClaimWithoutHeaders(PoolSession& session,
                                             std::span<const SlotClaim> claims,
                                             std::vector<bool>* claimed) {
  std::vector<size_t> refused;
  std::vector<SlotClaim> bare;
  for (size_t i = 0; i < claims.size(); ++i) {
    if ((*claimed)[i]) continue;
    refused.push_back(i);
    bare.push_back({claims[i].slot, std::nullopt});
  }
  if (refused.empty()) return absl::OkStatus();
  // Work reads the slot whether or not crumbd knows its page, so that it must stay held.
  CRUMB_ASSIGN_OR_RETURN(const std::vector<bool> held, session.Claim(KeyspaceId(), bare));
  for (size_t i = 0; i < refused.size(); ++i) (*claimed)[refused[i]] = held[i];
  const auto lost = std::count(held.begin(), held.end(), false);
  if (lost > 0) LogError("crumbd does not know {} slots of a device pool that are in use", lost);
  return absl::OkStatus();
}

}  // namespace crumb::client
