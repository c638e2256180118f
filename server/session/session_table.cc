// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/session_table.h"

#include <algorithm>

#include "common/limited_log.h"
#include "common/status_macros.h"

namespace crumb::server {
namespace {

constexpr uint64_t kPageBytes = 4096;

}  // namespace

absl::StatusOr<std::shared_ptr<Session>> SessionTable::Open(const OpenRequest& request) {
  CRUMB_ASSIGN_OR_RETURN(const RandomId token, RandomId::Make());
  const uint64_t wanted = std::min(request.staging_bytes, limits_.staging_bytes_max.value);
  const uint64_t staging_bytes = (wanted + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::shared_ptr<StagingArea> staging;
  if (staging_bytes > 0) {
    CRUMB_ASSIGN_OR_RETURN(
        staging, StagingArea::Create(staging_bytes, static_cast<size_t>(limits_.reservations_max)));
  }
  MutexLock lock(&mutex_);
  if (sessions_.contains(token.slot())) {
    return absl::UnavailableError("session ids collided, try again");
  }
  CRUMB_RETURN_IF_ERROR(TakeRoomLocked(request.tenant, staging_bytes));
  const absl::StatusOr<std::shared_ptr<Engine>> engine = JoinLocked(request);
  if (!engine.ok()) {
    session_budget_.Give(request.tenant);
    staging_budget_.Give(request.tenant, staging_bytes);
    return engine.status();
  }
  auto session =
      std::make_shared<Session>(token, request.process_name, *engine, std::move(staging));
  sessions_.emplace(token.slot(), session);
  ++engines_.at((*engine)->id().slot()).sessions;
  metrics_.sessions_opened.Add();
  return session;
}

absl::Status SessionTable::TakeRoomLocked(const std::string& tenant, uint64_t staging_bytes) {
  const TenantBudget::Taken session = session_budget_.Take(tenant);
  if (session != TenantBudget::Taken::kYes) {
    metrics_.Reject(Rejection::kSessions, session);
    return TenantBudget::Error(session, "sessions.sessions_max");
  }
  const TenantBudget::Taken staging = staging_budget_.Take(tenant, staging_bytes);
  if (staging == TenantBudget::Taken::kYes) return absl::OkStatus();
  session_budget_.Give(tenant);
  metrics_.Reject(Rejection::kStaging, staging);
  return TenantBudget::Error(staging, "sessions.staging_total_bytes_max");
}

absl::StatusOr<std::shared_ptr<Engine>> SessionTable::JoinLocked(const OpenRequest& request) {
  RandomId id;
  if (request.engine.empty()) {
    CRUMB_ASSIGN_OR_RETURN(id, RandomId::Make());
  } else {
    CRUMB_ASSIGN_OR_RETURN(id, RandomId::FromBytes(request.engine));
    const auto found = engines_.find(id.slot());
    if (found != engines_.end()) {
      const Engine& engine = *found->second.engine;
      if (engine.id().Matches(id) && engine.uid() == request.uid &&
          engine.tenant() == request.tenant) {
        return found->second.engine;
      }
      return absl::NotFoundError(
          "the engine's id is another user's or tenant's: choose 16 random bytes");
    }
  }
  if (engines_.contains(id.slot())) {
    return absl::UnavailableError("engine ids collided, try again");
  }
  const TenantBudget::Taken taken = engine_budget_.Take(request.tenant);
  if (taken != TenantBudget::Taken::kYes) {
    metrics_.Reject(Rejection::kSessions, taken);
    return TenantBudget::Error(taken, "sessions.engines_max");
  }
  auto engine = std::make_shared<Engine>(id, request.uid, request.tenant,
                                         static_cast<uint64_t>(limits_.lease_pages_max),
                                         static_cast<size_t>(limits_.leases_max));
  engines_.emplace(id.slot(), EngineEntry{engine});
  return engine;
}

std::shared_ptr<Session> SessionTable::Find(std::string_view token) const {
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(token);
  if (!id.ok()) return nullptr;
  MutexLock lock(&mutex_);
  const auto found = sessions_.find(id->slot());
  if (found == sessions_.end() || !found->second->token().Matches(*id)) return nullptr;
  return found->second;
}

void SessionTable::TakeStagingLocked(Session& session, Remains* remains) {
  if (auto staging = session.TakeStaging()) {
    staging_budget_.Give(session.engine().tenant(), staging->size());
    remains->staging.push_back(std::move(staging));
  }
}

void SessionTable::RemoveLocked(Session& session, Remains* remains) {
  Engine::Ended& ended = remains->ended;
  const bool disconnected = session.phase() == Session::Phase::kDisconnected;
  session.SetPhase(Session::Phase::kEnded);
  TakeStagingLocked(session, remains);
  const auto entry = engines_.find(session.engine().id().slot());
  if (disconnected) {
    --entry->second.disconnected;
    disconnected_.fetch_sub(1);
  }
  for (const storage::LeaseId lease : session.TakeAllJoined()) {
    std::shared_ptr<const void> held;
    if (session.engine().RemoveLease(lease, Engine::Hold::kJoined, session.token(), &held) ==
        Engine::Removal::kLast) {
      ended.leases.push_back(lease);
      ended.held.push_back(std::move(held));
    }
  }
  session.engine().DropAcquiredBy(session.token(), &ended);
  session_budget_.Give(session.engine().tenant());
  if (--entry->second.sessions == 0) {
    engine_budget_.Give(session.engine().tenant());
    session.engine().End(&ended);
    engines_.erase(entry);
  }
  sessions_.erase(session.token().slot());  // the caller holds the session
}

void SessionTable::Disconnect(const std::shared_ptr<Session>& session) {
  Remains remains;
  {
    MutexLock lock(&mutex_);
    if (session->phase() != Session::Phase::kOpen) return;
    session->SetPhase(Session::Phase::kDisconnected);
    TakeStagingLocked(*session, &remains);
    ++engines_.at(session->engine().id().slot()).disconnected;
    disconnected_.fetch_add(1);
  }
  if (memory_ != nullptr) memory_->CallsEnded(*session);
  Settle(session->engine());
}

void SessionTable::End(const std::shared_ptr<Session>& session) {
  Remains remains;
  {
    MutexLock lock(&mutex_);
    if (session->phase() == Session::Phase::kEnded) return;
    RemoveLocked(*session, &remains);
    metrics_.sessions_reaped.Add();
  }
  LogInfoLimited("session of {} ended with its process, {} leases ended", session->process_name(),
                 remains.ended.leases.size());
  if (memory_ != nullptr) memory_->ProcessEnded(*session);
  Release(remains);
}

void SessionTable::NoteStreamEnd(const Session& session) {
  if (memory_ != nullptr) memory_->CallsEnded(session);
}

void SessionTable::NoteLetGo(const Session& session) {
  if (disconnected_.load() > 0) Settle(session.engine());
}

bool SessionTable::Join(Session& session, storage::LeaseId lease) {
  if (!session.engine().JoinLease(lease)) return false;
  if (session.NoteJoined(lease)) return true;
  std::shared_ptr<const void> held;
  if (session.engine().RemoveLease(lease, Engine::Hold::kJoined, session.token(), &held) ==
      Engine::Removal::kLast) {
    store_.Release(lease);
  }
  return false;
}

bool SessionTable::Release(Session& session, storage::LeaseId lease) {
  const Engine::Hold hold =
      session.TakeJoined(lease) ? Engine::Hold::kJoined : Engine::Hold::kAcquired;
  std::shared_ptr<const void> held;
  const Engine::Removal removal = session.engine().RemoveLease(lease, hold, session.token(), &held);
  if (removal == Engine::Removal::kUnknown) return false;
  if (removal == Engine::Removal::kHeldByOthers) return true;
  store_.Release(lease);
  if (disconnected_.load() > 0) Settle(session.engine());
  return true;
}

// A thread that gives a session something looks at its phase afterwards and takes it back if the
// session has closed. Here the phase is read first: whichever thread comes second sees the other.
void SessionTable::Settle(const Engine& engine) {
  if (engine.leases() > 0) return;  // spares the lock
  std::vector<std::shared_ptr<Session>> ended;
  Remains remains;
  {
    MutexLock lock(&mutex_);
    for (const auto& [slot, session] : sessions_) {
      if (&session->engine() != &engine || session->phase() != Session::Phase::kDisconnected) {
        continue;
      }
      if (memory_ == nullptr || !memory_->Holds(*session)) ended.push_back(session);
    }
    if (engine.leases() > 0) return;
    for (const auto& session : ended) RemoveLocked(*session, &remains);
  }
  for (const auto& session : ended) {
    LogInfoLimited("session of {} ended", session->process_name());
    if (memory_ != nullptr) memory_->ProcessEnded(*session);
  }
  Release(remains);
  if (!ended.empty()) ended_();
}

void SessionTable::Release(const Remains& remains) {
  for (const storage::LeaseId lease : remains.ended.leases) store_.Release(lease);
  metrics_.leases_reaped.Add(remains.ended.leases.size());
}

SessionTable::Totals SessionTable::totals() const {
  MutexLock lock(&mutex_);
  Totals totals;
  totals.sessions = sessions_.size();
  totals.engines = engines_.size();
  totals.staging_bytes = staging_budget_.used();
  for (const auto& [slot, entry] : engines_) {
    totals.leases += entry.engine->leases();
    totals.leased_pages += entry.engine->pages();
  }
  for (const auto& [slot, session] : sessions_) {
    if (const auto staging = session->staging()) totals.reservations += staging->reservations();
  }
  return totals;
}

std::vector<std::shared_ptr<Session>> SessionTable::List() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Session>> list;
  for (const auto& [slot, session] : sessions_) list.push_back(session);
  return list;
}

}  // namespace crumb::server
