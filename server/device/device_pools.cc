// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/device/device_pools.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/errno_status.h"
#include "common/logging.h"
#include "common/roster.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr size_t kDeviceBytes = 16;
// How often it is looked whether processes that end without telling have ended.
constexpr Duration kCheckInterval = std::chrono::seconds(1);

absl::StatusOr<UniqueFd> Duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return ErrnoStatus(errno, "duplicating a descriptor of a device pool");
  return copy;
}

absl::Status CheckFds(const std::vector<UniqueFd>& fds, size_t expected) {
  if (fds.size() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the message carries {} descriptors, not {}", fds.size(), expected));
}

}  // namespace

DevicePools::DevicePools(const PoolOptions& options, storage::DeviceTier* tier, const Clock& clock,
                         ServerMetrics& metrics)
    : options_(options), tier_(tier), clock_(clock), metrics_(metrics) {
  if (tier_ == nullptr) return;
  tier_->SetDemoters(
      {.choose = [this](storage::DevicePoolNumber pool) { return ChooseDemoter(pool); },
       .ask =
           [this](storage::DevicePoolNumber pool, storage::HolderId holder,
                  std::span<const storage::DemotionWork> work) {
             return AskDemoter(pool, holder, work);
           }});
}

PoolReply DevicePools::Handle(const std::shared_ptr<Session>& session,
                              const v1::PoolRequest& request, std::vector<UniqueFd> fds) {
  PoolReply reply;
  absl::Status status = absl::InvalidArgumentError("the message is no known PoolRequest");
  if (!enabled()) {
    status = absl::FailedPreconditionError("this crumbd keeps no device pools");
  } else if (session->phase() != Session::Phase::kOpen) {
    status = absl::UnavailableError("the session is closed");
  } else if (request.has_join()) {
    status = Join(session, request.join(), std::move(fds), &reply);
  } else if (request.has_offer()) {
    status = Offer(*session, request.offer(), std::move(fds), &reply);
  } else if (request.has_fetch()) {
    status = Fetch(*session, request.fetch(), &reply);
  } else if (request.has_leave()) {
    status = Leave(*session, request.leave());
  } else if (request.has_reclaim()) {
    status = Reclaim(request.reclaim(), &reply);
  }
  if (status.ok()) return reply;
  PoolReply refusal;
  refusal.answer.set_code(static_cast<uint32_t>(status.code()));
  refusal.answer.set_error(std::string(status.message()));
  return refusal;
}

DevicePools::Pools::iterator DevicePools::FindLocked(std::string_view id) {
  return std::find_if(pools_.begin(), pools_.end(),
                      [&](const auto& entry) { return entry.second.id.view() == id; });
}

absl::StatusOr<DevicePools::Pools::iterator> DevicePools::JoinedLocked(const Session& session,
                                                                       std::string_view id) {
  const auto found = FindLocked(id);
  if (found == pools_.end() || !found->second.members.contains(HolderOf(session))) {
    return absl::InvalidArgumentError("pool: the session takes part in no such device pool");
  }
  return found;
}

// A pool that others are in comes first, then the one with the most memory.
DevicePools::Pools::iterator DevicePools::BestLocked(const v1::PoolRequest::Join& request,
                                                     const std::string& tenant) {
  auto best = pools_.end();
  for (auto pool = pools_.begin(); pool != pools_.end(); ++pool) {
    const Pool& there = pool->second;
    if (there.device != request.device() || there.tenant != tenant ||
        there.slot_bytes != request.slot_bytes() || there.handle_bytes != request.handle_bytes()) {
      continue;
    }
    const auto rank = [](const Pool& one) {
      return std::pair(!one.members.empty(), one.handles.size());
    };
    if (best == pools_.end() || rank(there) > rank(best->second)) best = pool;
  }
  return best;
}

absl::StatusOr<DevicePools::Pools::iterator> DevicePools::AddLocked(
    const v1::PoolRequest::Join& request, const std::string& tenant, std::vector<UniqueFd> fds) {
  if (pools_.size() >= static_cast<size_t>(options_.pools_max)) {
    metrics_.Reject(Rejection::kDevicePools);
    return absl::ResourceExhaustedError(fmt::format(
        "{} device pools are there, device_pools.pools_max allows no more", pools_.size()));
  }
  Pool pool;
  pool.device = request.device();
  pool.tenant = tenant;
  pool.slot_bytes = request.slot_bytes();
  pool.handle_bytes = request.handle_bytes();
  pool.recovering = !request.pool().empty();
  if (pool.recovering) {
    CRUMB_ASSIGN_OR_RETURN(pool.id, RandomId::FromBytes(request.pool()));
    CRUMB_RETURN_IF_ERROR(CheckFds(fds, 1));
    CRUMB_ASSIGN_OR_RETURN(pool.roster, AdoptRoster(fds.front().get()));
  } else {
    CRUMB_ASSIGN_OR_RETURN(pool.id, RandomId::Make());
    CRUMB_ASSIGN_OR_RETURN(pool.roster, CreateRoster());
  }
  CRUMB_ASSIGN_OR_RETURN(const storage::DevicePoolNumber number,
                         tier_->AddPool(pool.slot_bytes, pool.handle_bytes, pool.recovering));
  LogInfo("device pool {} {}: slots of {} bytes in handles of {}", number,
          pool.recovering ? "is there again" : "is new", pool.slot_bytes, pool.handle_bytes);
  return pools_.emplace(number, std::move(pool)).first;
}

absl::Status DevicePools::AddHandles(const Pool& pool, uint32_t first, PoolReply* reply) {
  for (auto handle = pool.handles.lower_bound(first); handle != pool.handles.end(); ++handle) {
    CRUMB_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(handle->second.get()));
    reply->answer.add_handles(handle->first);
    reply->fds.push_back(std::move(copy));
  }
  return absl::OkStatus();
}

absl::Status DevicePools::Join(const std::shared_ptr<Session>& session,
                               const v1::PoolRequest::Join& request, std::vector<UniqueFd> fds,
                               PoolReply* reply) {
  if (request.device().size() != kDeviceBytes) {
    return absl::InvalidArgumentError("device has another size than 16 bytes");
  }
  const std::string& tenant = session->engine().tenant();
  MutexLock lock(&mutex_);
  auto pool = pools_.end();
  if (request.pool().empty()) {
    pool = BestLocked(request, tenant);
  } else {
    pool = FindLocked(request.pool());
    const bool foreign = pool != pools_.end() && (pool->second.tenant != tenant ||
                                                  pool->second.device != request.device() ||
                                                  pool->second.slot_bytes != request.slot_bytes());
    if (foreign) return absl::InvalidArgumentError("pool: there is another of that id");
  }
  if (pool == pools_.end()) {
    CRUMB_ASSIGN_OR_RETURN(pool, AddLocked(request, tenant, std::move(fds)));
  }
  Member& member = pool->second.members[HolderOf(*session)];
  member.session = session;
  member.engine = &session->engine();
  member.leaving = false;
  if (request.roster_mark() != 0 && pool->second.recovering) {
    if (pool->second.known_marks.size() < kRosterMarksMax) {
      pool->second.known_marks.insert(request.roster_mark());
    }
    SettleRecoveryLocked(pool);
  }
  reply->answer.set_pool(std::string(pool->second.id.view()));
  CRUMB_ASSIGN_OR_RETURN(UniqueFd roster, Duplicate(pool->second.roster.get()));
  reply->answer.set_roster(true);
  reply->fds.push_back(std::move(roster));
  return AddHandles(pool->second, 0, reply);
}

absl::Status DevicePools::Offer(const Session& session, const v1::PoolRequest::Offer& request,
                                std::vector<UniqueFd> fds, PoolReply* reply) {
  CRUMB_RETURN_IF_ERROR(CheckFds(fds, 1));
  MutexLock lock(&mutex_);
  CRUMB_ASSIGN_OR_RETURN(const auto found, JoinedLocked(session, request.pool()));
  Pool& pool = found->second;
  const auto bound = static_cast<uint32_t>(options_.handles_max);
  if (pool.handles.size() >= bound) {
    metrics_.Reject(Rejection::kDeviceHandles);
    return absl::ResourceExhaustedError("device_pools.handles_max is reached");
  }
  const uint64_t bytes = (pool.handles.size() + 1) * pool.handle_bytes;
  if (request.bytes_max() != 0 && bytes > request.bytes_max()) {
    return absl::ResourceExhaustedError("the pool is as large as it may be");
  }
  uint32_t number = pool.handles.empty() ? 0 : pool.handles.rbegin()->first + 1;
  if (request.has_number()) {
    number = request.number();
    if (pool.handles.contains(number)) {
      return absl::AlreadyExistsError("the handle is there already");
    }
    if (!pool.recovering) {
      return absl::InvalidArgumentError("number: the pool is not being made anew");
    }
  } else if (pool.recovering) {
    return absl::UnavailableError("the pool's handles are not all known yet, try again");
  }
  if (number >= bound) {
    metrics_.Reject(Rejection::kDeviceHandles);
    return absl::ResourceExhaustedError("number is not below device_pools.handles_max");
  }
  if (SlotsLocked(pool, uint64_t{number} + 1) > static_cast<uint64_t>(options_.slots_max)) {
    metrics_.Reject(Rejection::kDeviceSlots);
    return absl::ResourceExhaustedError("device_pools.slots_max is reached");
  }
  if (!tier_->AddHandle(found->first, number)) return absl::InternalError("a handle's number");
  pool.handles.emplace(number, std::move(fds.front()));
  reply->answer.set_pool(std::string(pool.id.view()));
  reply->answer.add_handles(number);  // its descriptor is the sender's
  return absl::OkStatus();
}

uint64_t DevicePools::SlotsLocked(const Pool& pool, uint64_t end) const {
  uint64_t slots = 0;
  for (const auto& [number, there] : pools_) {
    uint64_t handles = there.handles.empty() ? 0 : uint64_t{there.handles.rbegin()->first} + 1;
    if (&there == &pool) handles = std::max(handles, end);
    slots += handles * (there.handle_bytes / there.slot_bytes);
  }
  return slots;
}

absl::Status DevicePools::Fetch(const Session& session, const v1::PoolRequest::Fetch& request,
                                PoolReply* reply) {
  MutexLock lock(&mutex_);
  CRUMB_ASSIGN_OR_RETURN(const auto found, JoinedLocked(session, request.pool()));
  reply->answer.set_pool(std::string(found->second.id.view()));
  return AddHandles(found->second, request.first(), reply);
}

absl::Status DevicePools::Leave(const Session& session, const v1::PoolRequest::Leave& request) {
  storage::DevicePoolNumber number;
  {
    MutexLock lock(&mutex_);
    CRUMB_ASSIGN_OR_RETURN(const auto found, JoinedLocked(session, request.pool()));
    number = found->first;
    found->second.members.at(HolderOf(session)).leaving = true;
  }
  tier_->EndDemotions(number, HolderOf(session));  // it is asked for no more
  MutexLock lock(&mutex_);
  const auto pool = pools_.find(number);
  if (pool != pools_.end()) DropLeaving(number, pool->second);
  return absl::OkStatus();
}

void DevicePools::DropLeaving(storage::DevicePoolNumber number, Pool& pool) {
  const size_t gone = std::erase_if(pool.members, [&](const auto& entry) {
    return entry.second.leaving && tier_->HeldBy(number, entry.first) == 0;
  });
  if (gone > 0 && pool.members.empty()) pool.idle_since = clock_.Now();
}

absl::Status DevicePools::Reclaim(const v1::PoolRequest::Reclaim& request, PoolReply* reply) {
  uint64_t freed = 0;
  MutexLock lock(&mutex_);
  std::vector<std::pair<TimePoint, storage::DevicePoolNumber>> idle;
  for (const auto& [number, pool] : pools_) {
    if (pool.members.empty() && pool.device == request.device()) {
      idle.push_back({pool.idle_since, number});
    }
  }
  std::sort(idle.begin(), idle.end());
  for (const auto& [since, number] : idle) {
    if (freed >= request.bytes()) break;
    const auto pool = pools_.find(number);
    const uint64_t bytes = pool->second.handles.size() * pool->second.handle_bytes;
    if (GiveUpLocked(pool)) freed += bytes;
  }
  reply->answer.set_bytes(freed);
  return absl::OkStatus();
}

bool DevicePools::GiveUpLocked(Pools::iterator pool) {
  if (!tier_->RemovePool(pool->first)) return false;  // an engine reads there still
  LogInfo("device pool {} of {} bytes is given up", pool->first,
          pool->second.handles.size() * pool->second.handle_bytes);
  pools_.erase(pool);
  ++given_up_;
  return true;
}

// Every process that marked the roster has said what it holds: the rest is free.
void DevicePools::SettleRecoveryLocked(Pools::iterator found) {
  Pool& pool = found->second;
  if (!pool.recovering) return;
  const auto marks = ReadRoster(pool.roster.get());
  if (!marks.ok()) return;  // nobody can tell: slots that nobody claimed stay unused
  const bool all_known = std::all_of(
      marks->begin(), marks->end(), [&](uint64_t mark) { return pool.known_marks.contains(mark); });
  if (!all_known) return;
  pool.recovering = false;
  pool.known_marks.clear();
  tier_->EndRecovery(found->first);
}

absl::StatusOr<storage::DevicePoolNumber> DevicePools::Joined(const Session& session,
                                                              std::string_view pool) const {
  MutexLock lock(&mutex_);
  for (const auto& [number, there] : pools_) {
    if (there.id.view() == pool && there.members.contains(HolderOf(session))) return number;
  }
  return absl::InvalidArgumentError("pool: the session takes part in no such device pool");
}

storage::DevicePoolNumber DevicePools::OfTenant(const Session& session,
                                                std::string_view pool) const {
  MutexLock lock(&mutex_);
  for (const auto& [number, there] : pools_) {
    if (there.id.view() == pool && there.tenant == session.engine().tenant()) return number;
  }
  return 0;
}

std::vector<storage::DevicePoolNumber> DevicePools::AllOf(const std::string& tenant) const {
  std::vector<storage::DevicePoolNumber> numbers;
  MutexLock lock(&mutex_);
  for (const auto& [number, pool] : pools_) {
    if (pool.tenant == tenant) numbers.push_back(number);
  }
  return numbers;
}

std::vector<storage::DevicePoolNumber> DevicePools::OfEngine(const Engine& engine) const {
  std::vector<storage::DevicePoolNumber> numbers;
  MutexLock lock(&mutex_);
  for (const auto& [number, pool] : pools_) {
    const bool joined =
        std::any_of(pool.members.begin(), pool.members.end(),
                    [&](const auto& entry) { return entry.second.engine == &engine; });
    if (joined) numbers.push_back(number);
  }
  return numbers;
}

absl::StatusOr<std::vector<uint64_t>> DevicePools::Reserve(const Session& session,
                                                           storage::DevicePoolNumber pool,
                                                           uint64_t request, size_t count) {
  using Slots = std::vector<uint64_t>;
  const storage::HolderId holder = HolderOf(session);
  const auto member_of = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> Member* {
    const auto found = pools_.find(pool);
    if (found == pools_.end()) return nullptr;
    const auto member = found->second.members.find(holder);
    return member == found->second.members.end() ? nullptr : &member->second;
  };
  {
    MutexLock lock(&mutex_);
    Member* member = member_of();
    if (member == nullptr || member->sealed) return Slots();
    if (request != 0) {
      if (member->last_request == request) return member->last_slots;
      if (request < member->last_request) return Slots();  // its caller has had the answer
      if (member->reserving) {
        return absl::UnavailableError("request: the session's last Reserve is still being served");
      }
      member->reserving = true;
    }
  }
  std::vector<uint64_t> slots = tier_->Reserve(pool, holder, count);
  {
    MutexLock lock(&mutex_);
    Member* member = member_of();
    if (member != nullptr && request != 0) member->reserving = false;
    // SessionTable ends a disconnected session that holds nothing. It sets the phase before it
    // looks at what the session holds, and this thread takes slots before it looks at the phase:
    // one of the two sees the other.
    if (member != nullptr && !member->sealed && session.phase() == Session::Phase::kOpen) {
      if (request != 0) {
        member->last_request = request;
        member->last_slots = slots;
      }
      return slots;
    }
  }
  tier_->Release(pool, holder, slots);  // the process or its session has ended meanwhile
  return Slots();
}

size_t DevicePools::ReleaseAllBut(const Session& session, storage::DevicePoolNumber pool,
                                  std::span<const uint64_t> kept) {
  const storage::HolderId holder = HolderOf(session);
  {
    MutexLock lock(&mutex_);
    const auto found = pools_.find(pool);
    if (found == pools_.end()) return 0;
    const auto member = found->second.members.find(holder);
    if (member == found->second.members.end()) return 0;
    member->second.sealed = member->second.leaving = true;
    member->second.last_slots.clear();
  }
  tier_->EndDemotions(pool, holder);  // nobody hears of them over that connection
  return tier_->ReleaseAllBut(pool, holder, kept);
}

bool DevicePools::Sealed(const Session& session, storage::DevicePoolNumber pool) const {
  MutexLock lock(&mutex_);
  const auto found = pools_.find(pool);
  if (found == pools_.end()) return true;
  const auto member = found->second.members.find(HolderOf(session));
  return member == found->second.members.end() || member->second.sealed ||
         session.phase() != Session::Phase::kOpen;
}

TimePoint DevicePools::Check() {
  TimePoint next = TimePoint::max();
  if (!enabled()) return next;
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  for (auto pool = pools_.begin(); pool != pools_.end();) {
    const auto checked = pool++;
    SettleRecoveryLocked(checked);
    DropLeaving(checked->first, checked->second);
    const auto& members = checked->second.members;
    const bool leaving = std::any_of(members.begin(), members.end(),
                                     [](const auto& entry) { return entry.second.leaving; });
    if (checked->second.recovering || leaving) next = std::min(next, now + kCheckInterval);
    if (!checked->second.members.empty()) continue;
    const TimePoint over = checked->second.idle_since + options_.keep_for;
    if (over > now) {
      next = std::min(next, over);
    } else if (!GiveUpLocked(checked)) {
      next = std::min(next, now + kCheckInterval);
    }
  }
  return next;
}

bool DevicePools::Holds(const Session& session) const {
  if (tier_ == nullptr) return false;
  const storage::HolderId holder = HolderOf(session);
  MutexLock lock(&mutex_);
  return std::any_of(pools_.begin(), pools_.end(),
                     [&](const auto& pool) { return tier_->HeldBy(pool.first, holder) > 0; });
}

void DevicePools::CallsEnded(const Session& session) {
  if (tier_ != nullptr) tier_->EndDemotions(HolderOf(session));
}

void DevicePools::ProcessEnded(const Session& session) {
  if (tier_ == nullptr) return;
  const storage::HolderId holder = HolderOf(session);
  {
    MutexLock lock(&mutex_);
    for (auto& [number, pool] : pools_) {
      if (pool.members.erase(holder) > 0 && pool.members.empty()) pool.idle_since = clock_.Now();
    }
  }
  tier_->EndHolder(holder);
}

storage::HolderId DevicePools::ChooseDemoter(storage::DevicePoolNumber number) const {
  MutexLock lock(&mutex_);
  const auto pool = pools_.find(number);
  if (pool == pools_.end()) return 0;
  for (const auto& [holder, member] : pool->second.members) {
    const auto session = member.session.lock();
    if (session != nullptr && !member.leaving && session->notices() != nullptr) return holder;
  }
  return 0;
}

bool DevicePools::AskDemoter(storage::DevicePoolNumber number, storage::HolderId holder,
                             std::span<const storage::DemotionWork> work) const {
  NoticeQueue::Demotions demotions;
  std::shared_ptr<Session> session;
  {
    MutexLock lock(&mutex_);
    const auto pool = pools_.find(number);
    if (pool == pools_.end()) return false;
    const auto member = pool->second.members.find(holder);
    if (member == pool->second.members.end() || member->second.leaving) return false;
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
  for (const auto& [number, pool] : pools_) {
    if (pool.members.empty()) ++totals.idle_pools;
  }
  return totals;
}

}  // namespace crumb::server
