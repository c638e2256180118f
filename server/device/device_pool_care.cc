// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>
#include <utility>

#include "common/limited_log.h"
#include "common/roster.h"
#include "fmt/format.h"
#include "server/device/device_pools.h"

// The end and the recovery of pools, and the handling of processes that end.
namespace crumb::server {
namespace {

// How often it is checked whether processes that leave or recover have done so.
constexpr Duration kCheckInterval = std::chrono::seconds(1);

Rejection RejectionOf(const PoolBudget::Verdict& verdict) {
  if (verdict.exceeded == PoolBudget::Exceeded::kTenant) return Rejection::kDeviceTenant;
  switch (verdict.resource) {
    case PoolBudget::Resource::kPools:
      return Rejection::kDevicePools;
    case PoolBudget::Resource::kDescriptors:
      return Rejection::kDeviceHandles;
    case PoolBudget::Resource::kSlots:
      break;
  }
  return Rejection::kDeviceSlots;
}

const char* KeyOf(PoolBudget::Resource resource) {
  switch (resource) {
    case PoolBudget::Resource::kPools:
      return "device_pools.pools_max";
    case PoolBudget::Resource::kDescriptors:
      return "device_pools.descriptors_max";
    case PoolBudget::Resource::kSlots:
      break;
  }
  return "device_pools.slots_max";
}

}  // namespace

uint64_t DevicePools::EndOf(const Pool& pool) {
  const uint64_t there = pool.handles.empty() ? 0 : uint64_t{pool.handles.rbegin()->first} + 1;
  const uint64_t arriving = pool.arriving.empty() ? 0 : uint64_t{*pool.arriving.rbegin()} + 1;
  return std::max(there, arriving);
}

PoolBudget::Amount DevicePools::AmountOf(const Pool& pool) {
  const uint64_t slots =
      pool.slot_bytes == 0 ? 0 : EndOf(pool) * (pool.handle_bytes / pool.slot_bytes);
  const uint64_t handles = pool.handles.size() + pool.arriving.size();
  return {.pools = 1, .descriptors = handles + 1, .slots = slots};
}

std::vector<storage::DevicePoolNumber> DevicePools::IdleLocked(const std::string& tenant) {
  const TimePoint now = clock_.Now();
  std::vector<std::tuple<bool, TimePoint, storage::DevicePoolNumber>> idle;
  for (const auto& [number, pool] : pools_) {
    if (!pool.members.empty()) continue;
    const bool foreign = pool.tenant != tenant;
    if (foreign && now - pool.idle_since < options_.keep_from_others) continue;
    idle.emplace_back(foreign, pool.idle_since, number);
  }
  std::sort(idle.begin(), idle.end());
  std::vector<storage::DevicePoolNumber> numbers;
  for (const auto& [foreign, since, number] : idle) numbers.push_back(number);
  return numbers;
}

absl::Status DevicePools::MakeRoomLocked(const std::string& tenant, const PoolBudget::Amount& more,
                                         RoomMaking* room) {
  SettleEndedLocked();
  PoolBudget::Verdict verdict = budget_.Check(tenant, more);
  if (verdict.exceeded == PoolBudget::Exceeded::kNone) return absl::OkStatus();
  room->over = RejectionOf(verdict);
  verdict = budget_.Check(tenant, more, PoolBudget::Beside::kOnceEnded);
  for (const storage::DevicePoolNumber number : IdleLocked(tenant)) {
    if (verdict.exceeded == PoolBudget::Exceeded::kNone) break;
    const auto pool = pools_.find(number);
    const bool foreign = pool->second.tenant != tenant;
    // Pools that other tenants give up make a tenant's own part no larger.
    if (foreign && verdict.exceeded == PoolBudget::Exceeded::kTenant) break;
    if (!GiveUpLocked(pool, &room->retired)) continue;
    verdict = budget_.Check(tenant, more, PoolBudget::Beside::kOnceEnded);
  }
  if (verdict.exceeded != PoolBudget::Exceeded::kNone) return RefuseLocked(tenant, verdict);
  room->waits = true;
  MutexLock lock(&ended_->mutex);
  // Every change that SettleEndedLocked has not seen is still in `amounts`.
  room->ended = ended_->pools - ended_->amounts.size();
  return absl::UnavailableError("pools that make room for it are still being ended, try again");
}

void DevicePools::SettleEndedLocked() {
  MutexLock lock(&ended_->mutex);
  for (const auto& [tenant, amount] : ended_->amounts) budget_.GiveBack(tenant, amount);
  ended_->amounts.clear();
}

bool DevicePools::EndAndWait(RoomMaking room, TimePoint until) {
  EndRetired(std::move(room.retired));
  if (!room.waits) return false;
  MutexLock lock(&ended_->mutex);
  while (ended_->pools == room.ended) {
    if (ended_->changed.WaitUntil(&ended_->mutex, until) || ended_->pools != room.ended) continue;
    metrics_.Reject(room.over);
    return false;
  }
  return true;
}

absl::Status DevicePools::RefuseLocked(const std::string& tenant,
                                       const PoolBudget::Verdict& verdict) {
  metrics_.Reject(RejectionOf(verdict));
  const char* key = KeyOf(verdict.resource);
  if (verdict.exceeded == PoolBudget::Exceeded::kTenant) {
    return absl::ResourceExhaustedError(fmt::format(
        "tenant {} has its part of {}: raise it, or device_pools.tenant_percent", tenant, key));
  }
  return absl::ResourceExhaustedError(fmt::format("{} is reached", key));
}

bool DevicePools::GiveUpLocked(Pools::iterator pool, std::vector<Retired>* retired) {
  auto taken = tier_->slots().TakePool(pool->first);
  if (!taken) return false;  // a request or an engine reads there still
  const PoolBudget::Amount amount = AmountOf(pool->second);
  budget_.BeginEnd(pool->second.tenant, amount);
  by_id_.erase(std::string(pool->second.id.view()));
  retired->push_back({std::move(pool->second), *std::move(taken), amount});
  pools_.erase(pool);
  ++given_up_;
  return true;
}

void DevicePools::EndRetired(std::vector<Retired> retired) {
  for (Retired& one : retired) {
    LogInfoLimited("device pool {} of {} bytes is given up", one.taken.number,
                   one.pool.handles.size() * one.pool.handle_bytes);
    const std::string tenant = one.pool.tenant;
    auto shared = std::make_shared<Retired>(std::move(one));
    const size_t descriptors = shared->amount.descriptors;
    const auto end = [tier = tier_, ended = ended_, tenant, shared] {
      tier->slots().EndPool(std::move(shared->taken));
      shared->pool = Pool();  // closes its descriptors
      MutexLock lock(&ended->mutex);
      ++ended->pools;
      ended->amounts.emplace_back(tenant, shared->amount);
      ended->changed.NotifyAll();
    };
    // Bounded by the tenant's budget, because the descriptors count until the task has run.
    tasks_.SubmitAlways(tenant, end, descriptors);
  }
}

void DevicePools::SettleRecovery(storage::DevicePoolNumber number) {
  SharedFd roster;
  {
    MutexLock lock(&mutex_);
    const auto found = pools_.find(number);
    if (found == pools_.end() || !found->second.recovering) return;
    roster = found->second.roster;
  }
  const auto marks = ReadOwnRoster(roster->get());
  MutexLock lock(&mutex_);
  const auto found = pools_.find(number);
  if (found == pools_.end()) return;
  Pool& pool = found->second;
  pool.settling = false;
  // Without the marks it is not known who is missing: slots that were not claimed stay unused.
  if (!pool.recovering || !marks.ok()) return;
  const bool all_known = std::all_of(
      marks->begin(), marks->end(), [&](uint64_t mark) { return pool.known_marks.contains(mark); });
  if (!all_known) return;
  pool.recovering = false;
  pool.known_marks.clear();
  tier_->slots().EndRecovery(number);
}

bool DevicePools::EraseMemberLocked(storage::DevicePoolNumber number, Pool& pool,
                                    storage::HolderId holder) {
  const auto member = pool.members.find(holder);
  if (member == pool.members.end()) return false;
  const auto engine = by_engine_.find(member->second.engine);
  if (--engine->second[number] == 0) engine->second.erase(number);
  if (engine->second.empty()) by_engine_.erase(engine);
  pool.members.erase(member);
  pool.leaving.erase(holder);
  if (pool.members.empty()) pool.idle_since = clock_.Now();
  return true;
}

void DevicePools::DropLeavingLocked(storage::DevicePoolNumber number, Pool& pool) {
  const std::vector<storage::HolderId> leaving(pool.leaving.begin(), pool.leaving.end());
  for (const storage::HolderId holder : leaving) {
    if (tier_->slots().HeldBy(number, holder) == 0) EraseMemberLocked(number, pool, holder);
  }
}

TimePoint DevicePools::Check() {
  TimePoint next = TimePoint::max();
  if (!enabled()) return next;
  const TimePoint now = clock_.Now();
  std::vector<Retired> retired;
  {
    MutexLock lock(&mutex_);
    for (auto pool = pools_.begin(); pool != pools_.end();) {
      const auto checked = pool++;
      const storage::DevicePoolNumber number = checked->first;
      Pool& there = checked->second;
      if (there.recovering && !there.settling) {
        there.settling = tasks_.Submit(there.tenant, [this, number] { SettleRecovery(number); });
      }
      DropLeavingLocked(number, there);
      if (there.recovering || !there.leaving.empty()) next = std::min(next, now + kCheckInterval);
      if (!there.members.empty()) continue;
      const TimePoint over = there.idle_since + options_.keep_for;
      if (over > now) {
        next = std::min(next, over);
      } else if (!GiveUpLocked(checked, &retired)) {
        next = std::min(next, now + kCheckInterval);
      }
    }
  }
  EndRetired(std::move(retired));
  return next;
}

bool DevicePools::Holds(const Session& session) const {
  if (tier_ == nullptr) return false;
  const storage::HolderId holder = HolderOf(session);
  MutexLock lock(&mutex_);
  return std::any_of(pools_.begin(), pools_.end(), [&](const auto& pool) {
    return tier_->slots().HeldBy(pool.first, holder) > 0;
  });
}

void DevicePools::CallsEnded(const Session& session) {
  if (tier_ != nullptr) tier_->slots().EndDemotions(HolderOf(session));
}

void DevicePools::ProcessEnded(const Session& session) {
  if (tier_ == nullptr) return;
  const storage::HolderId holder = HolderOf(session);
  {
    MutexLock lock(&mutex_);
    for (auto& [number, pool] : pools_) EraseMemberLocked(number, pool, holder);
  }
  tier_->slots().EndHolder(holder);
}

storage::HolderId DevicePools::ChooseDemoter(storage::DevicePoolNumber number) const {
  MutexLock lock(&mutex_);
  const auto pool = pools_.find(number);
  if (pool == pools_.end()) return 0;
  for (const auto& [holder, member] : pool->second.members) {
    const auto session = member.session.lock();
    const bool leaving = pool->second.leaving.contains(holder);
    if (session != nullptr && !leaving && session->notices() != nullptr) return holder;
  }
  return 0;
}

bool DevicePools::RequestDemotion(storage::DevicePoolNumber number, storage::HolderId holder,
                                  std::span<const storage::DemotionWork> work) const {
  NoticeQueue::Demotions demotions;
  std::shared_ptr<Session> session;
  {
    MutexLock lock(&mutex_);
    const auto pool = pools_.find(number);
    if (pool == pools_.end()) return false;
    const auto member = pool->second.members.find(holder);
    if (member == pool->second.members.end() || pool->second.leaving.contains(holder)) return false;
    session = member->second.session.lock();
    demotions.pool = pool->second.id;
  }
  if (session == nullptr) return false;
  const auto notices = session->notices();
  if (notices == nullptr) return false;
  demotions.work.assign(work.begin(), work.end());
  return notices->AddDemotions(std::move(demotions));
}

DevicePools::Totals DevicePools::totals() const {
  Totals totals;
  MutexLock lock(&mutex_);
  totals.pools = pools_.size();
  totals.given_up = given_up_;
  totals.descriptors = budget_.total().descriptors;
  {
    MutexLock ended(&ended_->mutex);
    for (const auto& [tenant, amount] : ended_->amounts) totals.descriptors -= amount.descriptors;
  }
  totals.descriptors_max = budget_.max().descriptors;
  for (const auto& [number, pool] : pools_) {
    if (pool.members.empty()) ++totals.idle_pools;
  }
  return totals;
}

}  // namespace crumb::server
