// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/device/device_pools.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "common/roster.h"
#include "common/status_macros.h"
#include "fmt/format.h"

// The requests of processes about pools, and the pools that they may use. Ends of pools are in
// device_pool_care.cc.
namespace crumb::server {
namespace {

constexpr size_t kDeviceBytes = 16;
// How long a request waits for pools to end that it has given up for room. Their end takes
// microseconds unless a process makes the close of a descriptor block.
constexpr Duration kEndWait = std::chrono::seconds(2);

absl::Status CheckFds(const std::vector<UniqueFd>& fds, size_t expected) {
  if (fds.size() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("the message carries {} descriptors, not {}", fds.size(), expected));
}

// A handle is memory of a device (a character device or a file without a type) or, in processes
// without a device, a memory file. Files of file systems, sockets and pipes are none: closing them
// may wait for another process. Calls no file system.
absl::Status CheckHandle(int fd) {
  if (::fcntl(fd, F_GET_SEALS) >= 0) return absl::OkStatus();
  struct statx status {};
  if (::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &status) == 0) {
    const unsigned type = status.stx_mode & S_IFMT;
    if (type == S_IFCHR || type == 0) return absl::OkStatus();
  }
  return absl::InvalidArgumentError("a handle's descriptor is not one of device memory");
}

}  // namespace

DevicePools::DevicePools(const PoolOptions& options, storage::DeviceTier* tier, const Clock& clock,
                         ServerMetrics& metrics)
    : options_(options),
      tier_(tier),
      clock_(clock),
      metrics_(metrics),
      budget_(options),
      tasks_({.name = "crumb-pools"}) {
  if (tier_ == nullptr) return;
  tier_->slots().SetDemoters(
      {.choose = [this](storage::DevicePoolNumber pool) { return ChooseDemoter(pool); },
       .request =
           [this](storage::DevicePoolNumber pool, storage::HolderId holder,
                  std::span<const storage::DemotionWork> work) {
             return RequestDemotion(pool, holder, work);
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
    status = Join(session, request.join(), fds, &reply);
  } else if (request.has_offer()) {
    status = Offer(*session, request.offer(), std::move(fds), &reply);
  } else if (request.has_fetch()) {
    status = Fetch(*session, request.fetch(), &reply);
  } else if (request.has_leave()) {
    status = Leave(*session, request.leave());
  } else if (request.has_reclaim()) {
    status = Reclaim(*session, request.reclaim(), &reply);
  }
  if (status.ok()) return reply;
  PoolReply refusal;
  refusal.response.set_code(static_cast<uint32_t>(status.code()));
  refusal.response.set_error(std::string(status.message()));
  return refusal;
}

DevicePools::Pools::iterator DevicePools::FindLocked(std::string_view id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? pools_.end() : pools_.find(found->second);
}

absl::StatusOr<DevicePools::Pools::iterator> DevicePools::JoinedLocked(const Session& session,
                                                                       std::string_view id) {
  const auto found = FindLocked(id);
  if (found == pools_.end() || !found->second.members.contains(HolderOf(session))) {
    return absl::InvalidArgumentError("pool: the session takes part in no such device pool");
  }
  return found;
}

bool DevicePools::SameKind(const Pool& pool, const v1::PoolRequest::Join& request,
                           const std::string& tenant) {
  return pool.tenant == tenant && pool.device == request.device() &&
         pool.slot_bytes == request.slot_bytes() && pool.handle_bytes == request.handle_bytes();
}

// A pool that others are in comes first, then the one with the most memory.
DevicePools::Pools::iterator DevicePools::BestLocked(const v1::PoolRequest::Join& request,
                                                     const std::string& tenant) {
  const auto rank = [](const Pool& one) {
    return std::pair(!one.members.empty(), one.handles.size());
  };
  auto best = pools_.end();
  for (auto pool = pools_.begin(); pool != pools_.end(); ++pool) {
    if (!SameKind(pool->second, request, tenant)) continue;
    if (best == pools_.end() || rank(pool->second) > rank(best->second)) best = pool;
  }
  return best;
}

absl::StatusOr<DevicePools::Pools::iterator> DevicePools::AddLocked(
    const v1::PoolRequest::Join& request, const std::string& tenant, Roster& roster,
    RoomMaking* room) {
  Pool pool;
  pool.device = request.device();
  pool.tenant = tenant;
  pool.slot_bytes = request.slot_bytes();
  pool.handle_bytes = request.handle_bytes();
  pool.recovering = roster.file != nullptr;
  CRUMB_RETURN_IF_ERROR(MakeRoomLocked(tenant, AmountOf(pool), room));
  if (pool.recovering) {
    CRUMB_ASSIGN_OR_RETURN(pool.id, RandomId::FromBytes(request.pool()));
  } else {
    CRUMB_ASSIGN_OR_RETURN(pool.id, RandomId::Make());
    CRUMB_ASSIGN_OR_RETURN(UniqueFd fresh, CreateRoster());
    CRUMB_ASSIGN_OR_RETURN(roster.removed, SlotMarks::Map(fresh.get()));
    roster.file = std::make_shared<const UniqueFd>(std::move(fresh));
  }
  pool.roster = std::move(roster.file);
  CRUMB_ASSIGN_OR_RETURN(const storage::DevicePoolNumber number,
                         tier_->slots().AddPool(pool.slot_bytes, pool.handle_bytes, pool.recovering,
                                                std::move(roster.removed)));
  budget_.Take(tenant, AmountOf(pool));
  by_id_.emplace(pool.id.view(), number);
  return pools_.emplace(number, std::move(pool)).first;
}

absl::StatusOr<DevicePools::Pools::iterator> DevicePools::PoolToJoinLocked(
    const v1::PoolRequest::Join& request, const std::string& tenant, Roster& roster,
    RoomMaking* room) {
  const auto known =
      request.pool().empty() ? BestLocked(request, tenant) : FindLocked(request.pool());
  if (known == pools_.end()) {
    // It was there when the roster would have been opened.
    if (!request.pool().empty() && roster.file == nullptr) {
      return absl::UnavailableError("pool: it has just been given up, try again");
    }
    return AddLocked(request, tenant, roster, room);
  }
  if (!SameKind(known->second, request, tenant)) {
    return absl::InvalidArgumentError("pool: there is another of that id");
  }
  return known;
}

void DevicePools::AddHandles(const Pool& pool, uint32_t first, PoolReply* reply) {
  for (auto handle = pool.handles.lower_bound(first); handle != pool.handles.end(); ++handle) {
    reply->response.add_handles(handle->first);
    reply->fds.push_back(handle->second);
  }
}

absl::Status DevicePools::Join(const std::shared_ptr<Session>& session,
                               const v1::PoolRequest::Join& request,
                               const std::vector<UniqueFd>& fds, PoolReply* reply) {
  if (request.device().size() != kDeviceBytes) {
    return absl::InvalidArgumentError("device has another size than 16 bytes");
  }
  const bool by_id = !request.pool().empty();
  const auto is_known = [&] {
    MutexLock lock(&mutex_);
    return FindLocked(request.pool()) != pools_.end();
  };
  Roster roster;  // opened before the lock is taken: its sender chooses how long that takes
  if (by_id && !is_known()) {
    CRUMB_RETURN_IF_ERROR(CheckFds(fds, 1));
    CRUMB_ASSIGN_OR_RETURN(UniqueFd adopted, AdoptRoster(fds.front().get()));
    CRUMB_ASSIGN_OR_RETURN(roster.removed, SlotMarks::Map(adopted.get()));
    roster.file = std::make_shared<const UniqueFd>(std::move(adopted));
  }
  const TimePoint until = Clock::Real().Now() + kEndWait;
  absl::StatusOr<storage::DevicePoolNumber> number = absl::InternalError("not tried");
  RoomMaking room;
  do {
    room = RoomMaking();
    number = TryJoin(session, request, roster, reply, &room);
  } while (EndAndWait(std::move(room), until));
  CRUMB_RETURN_IF_ERROR(number.status());
  if (request.roster_mark() != 0) SettleRecovery(*number);
  return absl::OkStatus();
}

absl::StatusOr<storage::DevicePoolNumber> DevicePools::TryJoin(
    const std::shared_ptr<Session>& session, const v1::PoolRequest::Join& request, Roster& roster,
    PoolReply* reply, RoomMaking* room) {
  MutexLock lock(&mutex_);
  // A session that ends later takes its membership with it (ProcessEnded).
  if (session->phase() != Session::Phase::kOpen) {
    return absl::UnavailableError("the session is closed");
  }
  CRUMB_ASSIGN_OR_RETURN(const auto pool,
                         PoolToJoinLocked(request, session->engine().tenant(), roster, room));
  Pool& joined = pool->second;
  const auto [member, is_new] = joined.members.try_emplace(HolderOf(*session));
  member->second.session = session;
  member->second.engine = &session->engine();
  if (is_new) ++by_engine_[&session->engine()][pool->first];
  joined.leaving.erase(HolderOf(*session));
  if (joined.recovering && request.roster_mark() != 0 &&
      joined.known_marks.size() < kRosterMarksMax) {
    joined.known_marks.insert(request.roster_mark());
  }
  reply->response.set_pool(std::string(joined.id.view()));
  reply->response.set_roster(true);
  reply->fds.push_back(joined.roster);
  AddHandles(joined, 0, reply);
  return pool->first;
}

absl::Status DevicePools::Offer(const Session& session, const v1::PoolRequest::Offer& request,
                                std::vector<UniqueFd> fds, PoolReply* reply) {
  CRUMB_RETURN_IF_ERROR(CheckFds(fds, 1));
  CRUMB_RETURN_IF_ERROR(CheckHandle(fds.front().get()));
  auto handle = std::make_shared<const UniqueFd>(std::move(fds.front()));
  const TimePoint until = Clock::Real().Now() + kEndWait;
  absl::StatusOr<Expected> expected = absl::InternalError("not tried");
  RoomMaking room;
  do {
    room = RoomMaking();
    expected = TryOffer(session, request, &room);
  } while (EndAndWait(std::move(room), until));
  CRUMB_RETURN_IF_ERROR(expected.status());
  const auto [pool, number] = *expected;
  // Without the lock: it allocates memory in the number of the handle's slots. Other processes see
  // the handle behind it, so that every slot they claim or are given is there.
  const bool added = tier_->slots().AddHandle(pool, number);
  MutexLock lock(&mutex_);
  const auto found = pools_.find(pool);
  if (!added || found == pools_.end()) {
    return absl::AbortedError("pool: it has been given up meanwhile");
  }
  found->second.arriving.erase(number);
  found->second.handles.emplace(number, std::move(handle));
  reply->response.set_pool(request.pool());
  reply->response.add_handles(number);  // its descriptor is the sender's
  return absl::OkStatus();
}

absl::StatusOr<DevicePools::Expected> DevicePools::TryOffer(const Session& session,
                                                            const v1::PoolRequest::Offer& request,
                                                            RoomMaking* room) {
  MutexLock lock(&mutex_);
  CRUMB_ASSIGN_OR_RETURN(const auto found, JoinedLocked(session, request.pool()));
  CRUMB_ASSIGN_OR_RETURN(const uint32_t number, ExpectHandleLocked(found->second, request, room));
  return Expected(found->first, number);
}

absl::StatusOr<uint32_t> DevicePools::NumberLocked(const Pool& pool,
                                                   const v1::PoolRequest::Offer& request) {
  const size_t count = pool.handles.size() + pool.arriving.size();
  if (count >= static_cast<size_t>(options_.handles_max)) {
    metrics_.Reject(Rejection::kDeviceHandles);
    return absl::ResourceExhaustedError("device_pools.handles_max is reached");
  }
  const uint64_t bytes = (count + 1) * pool.handle_bytes;
  if (request.bytes_max() != 0 && bytes > request.bytes_max()) {
    return absl::ResourceExhaustedError("the pool is as large as it may be");
  }
  uint64_t number = EndOf(pool);
  if (request.has_number()) {
    number = request.number();
    if (pool.arriving.contains(request.number())) {
      return absl::UnavailableError("the handle is just being added, try again");
    }
    if (pool.handles.contains(request.number())) {
      return absl::AlreadyExistsError("the handle is there already");
    }
    if (!pool.recovering) {
      return absl::InvalidArgumentError("number: the pool is not recovering");
    }
  } else if (pool.recovering) {
    return absl::UnavailableError("the pool's handles are not all known yet, try again");
  }
  if (number >= static_cast<uint64_t>(options_.handles_max)) {
    metrics_.Reject(Rejection::kDeviceHandles);
    return absl::ResourceExhaustedError("number is not below device_pools.handles_max");
  }
  return static_cast<uint32_t>(number);
}

absl::StatusOr<uint32_t> DevicePools::ExpectHandleLocked(Pool& pool,
                                                         const v1::PoolRequest::Offer& request,
                                                         RoomMaking* room) {
  CRUMB_ASSIGN_OR_RETURN(const uint32_t number, NumberLocked(pool, request));
  const uint64_t end = EndOf(pool);
  const uint64_t added = std::max(end, uint64_t{number} + 1) - end;
  const PoolBudget::Amount more = {.descriptors = 1,
                                   .slots = added * (pool.handle_bytes / pool.slot_bytes)};
  CRUMB_RETURN_IF_ERROR(MakeRoomLocked(pool.tenant, more, room));
  budget_.Take(pool.tenant, more);
  pool.arriving.insert(number);
  return number;
}

absl::Status DevicePools::Fetch(const Session& session, const v1::PoolRequest::Fetch& request,
                                PoolReply* reply) {
  MutexLock lock(&mutex_);
  CRUMB_ASSIGN_OR_RETURN(const auto found, JoinedLocked(session, request.pool()));
  reply->response.set_pool(std::string(found->second.id.view()));
  AddHandles(found->second, request.first(), reply);
  return absl::OkStatus();
}

absl::Status DevicePools::Leave(const Session& session, const v1::PoolRequest::Leave& request) {
  storage::DevicePoolNumber number;
  {
    MutexLock lock(&mutex_);
    CRUMB_ASSIGN_OR_RETURN(const auto found, JoinedLocked(session, request.pool()));
    number = found->first;
    found->second.leaving.insert(HolderOf(session));
  }
  tier_->slots().EndDemotions(number, HolderOf(session));  // it gets no more requests
  MutexLock lock(&mutex_);
  const auto pool = pools_.find(number);
  if (pool != pools_.end()) DropLeavingLocked(number, pool->second);
  return absl::OkStatus();
}

absl::Status DevicePools::Reclaim(const Session& session, const v1::PoolRequest::Reclaim& request,
                                  PoolReply* reply) {
  uint64_t freed = 0;
  std::vector<Retired> retired;
  {
    MutexLock lock(&mutex_);
    for (const storage::DevicePoolNumber number : IdleLocked(session.engine().tenant())) {
      if (freed >= request.bytes()) break;
      const auto pool = pools_.find(number);
      if (pool->second.device != request.device()) continue;
      const uint64_t bytes = pool->second.handles.size() * pool->second.handle_bytes;
      if (GiveUpLocked(pool, &retired)) freed += bytes;
    }
  }
  EndRetired(std::move(retired));
  reply->response.set_bytes(freed);
  return absl::OkStatus();
}

absl::StatusOr<storage::DevicePoolNumber> DevicePools::Joined(const Session& session,
                                                              std::string_view pool) const {
  MutexLock lock(&mutex_);
  const auto found = by_id_.find(pool);
  if (found != by_id_.end() && pools_.at(found->second).members.contains(HolderOf(session))) {
    return found->second;
  }
  return absl::InvalidArgumentError("pool: the session takes part in no such device pool");
}

storage::DevicePoolNumber DevicePools::OfTenant(const Session& session,
                                                std::string_view pool) const {
  MutexLock lock(&mutex_);
  const auto found = by_id_.find(pool);
  if (found == by_id_.end()) return 0;
  return pools_.at(found->second).tenant == session.engine().tenant() ? found->second : 0;
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
  const auto found = by_engine_.find(&engine);
  if (found == by_engine_.end()) return numbers;
  for (const auto& [number, sessions] : found->second) numbers.push_back(number);
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
      if (request < member->last_request) return Slots();  // its caller has received the response
      if (member->reserving) {
        return absl::UnavailableError("request: the session's last Reserve is still being served");
      }
      member->reserving = true;
    }
  }
  std::vector<uint64_t> slots = tier_->slots().Reserve(pool, holder, count);
  {
    MutexLock lock(&mutex_);
    Member* member = member_of();
    if (member != nullptr && request != 0) member->reserving = false;
    // SessionTable ends a disconnected session that holds nothing. It sets the phase before it
    // checks for holds, and this thread takes slots before it checks the phase, so at least one of
    // the two threads sees the other's change.
    if (member != nullptr && !member->sealed && session.phase() == Session::Phase::kOpen) {
      if (request != 0) {
        member->last_request = request;
        member->last_slots = slots;
      }
      return slots;
    }
  }
  tier_->slots().Release(pool, holder, slots);  // the process or its session has ended meanwhile
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
    member->second.sealed = true;
    member->second.last_slots.clear();
    found->second.leaving.insert(holder);
  }
  tier_->slots().EndDemotions(pool,
                              holder);  // they are not announced over that connection any more
  return tier_->slots().ReleaseAllBut(pool, holder, kept);
}

bool DevicePools::Sealed(const Session& session, storage::DevicePoolNumber pool) const {
  MutexLock lock(&mutex_);
  const auto found = pools_.find(pool);
  if (found == pools_.end()) return true;
  const auto member = found->second.members.find(HolderOf(session));
  return member == found->second.members.end() || member->second.sealed ||
         session.phase() != Session::Phase::kOpen;
}

}  // namespace crumb::server
