// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/pools/device_pool.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Number of demotions that wait for the thread; crumbd's own bound is lower.
constexpr size_t kDemotionsMax = 4096;
// Number of pages demoted in one call.
constexpr size_t kDemotionBatch = 16;
// Number of slots in one call; below the default of crumbd's limits.commit_fragments_max.
constexpr int kReserveMax = 2048;

absl::Status Validate(const DevicePoolOptions& options, const DeviceMemory& memory) {
  const uint64_t piece = memory.granularity();
  if (options.slot_bytes == 0 || options.slot_bytes % kTileAlignment != 0 ||
      options.slot_bytes > options.handle_bytes) {
    return absl::InvalidArgumentError(
        "DevicePoolOptions.slot_bytes must be a multiple of 128 and fit into handle_bytes");
  }
  if (options.handle_bytes % piece != 0 || options.range_bytes % piece != 0 ||
      options.range_bytes < options.bytes_max) {
    return absl::InvalidArgumentError(
        "DevicePoolOptions: handle_bytes and range_bytes must be multiples of the device's "
        "granularity, range_bytes no less than bytes_max");
  }
  if (options.blank_slots < 0 || (options.blank_slots == 0 && options.bytes_max > 0)) {
    return absl::InvalidArgumentError(
        "DevicePoolOptions.blank_slots must be 1 or more, or 0 without memory to give");
  }
  return absl::OkStatus();
}

}  // namespace

// A group of slots that is released together.
struct DevicePool::HeldSlots {
  HeldSlots(DevicePool& of, std::shared_ptr<const Lease> under)
      : pool(of), lease(std::move(under)) {}
  HeldSlots(const HeldSlots&) = delete;
  HeldSlots& operator=(const HeldSlots&) = delete;
  ~HeldSlots() { pool.EndUses(slots); }

  DevicePool& pool;
  const std::shared_ptr<const Lease> lease;
  std::vector<DeviceSlot> slots;
};

absl::StatusOr<std::unique_ptr<DevicePool>> DevicePool::Open(const DevicePoolOptions& options,
                                                             DeviceMemory& memory, Client& client) {
  CRUMB_RETURN_IF_ERROR(Validate(options, memory));
  if (client.pools() == nullptr) {
    return absl::FailedPreconditionError("device pools need a crumbd on this host");
  }
  CRUMB_ASSIGN_OR_RETURN(auto range, PoolRange::Open({.slot_bytes = options.slot_bytes,
                                                      .handle_bytes = options.handle_bytes,
                                                      .bytes_max = options.bytes_max,
                                                      .range_bytes = options.range_bytes},
                                                     memory, *client.pools()));
  std::unique_ptr<DevicePool> pool(new DevicePool(options, memory, client, std::move(range)));
  CRUMB_RETURN_IF_ERROR(pool->link_.Listen(pool->name_, pool.get()));
  pool->thread_ = Thread("crumb-pool", [pool = pool.get()] { pool->Run(); });
  return pool;
}

DevicePool::~DevicePool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
  std::shared_ptr<PoolSession> session;
  std::vector<uint64_t> stock;
  {
    MutexLock lock(&mutex_);
    session = std::move(session_);
    stock.swap(stock_);
  }
  if (session != nullptr) {
    session->ReleaseLater(stock);
    session->Leave();
  }
  link_.StopListening(this);  // the client can join the pool again afterwards
}

void DevicePool::HoldBlanks(std::span<const uint64_t> slots,
                            std::vector<std::shared_ptr<const DeviceSlot>>* held) {
  const auto run = std::make_shared<HeldSlots>(*this, nullptr);
  run->slots.reserve(slots.size());
  for (const uint64_t slot : slots) {
    held->emplace_back(run, &run->slots.emplace_back(range_->AddressOf(slot), slot));
    records_.Use(slot).held_by = session_;
  }
}

std::shared_ptr<const DeviceSlot> DevicePool::TakeBlank() {
  MutexLock lock(&mutex_);
  if (stock_.empty()) {
    ++stats_.out_of_slots;
    changed_.NotifyAll();
    return nullptr;
  }
  const uint64_t slot = stock_.back();
  stock_.pop_back();
  if (stock_.size() * 2 <= static_cast<size_t>(options_.blank_slots)) changed_.NotifyAll();
  std::vector<std::shared_ptr<const DeviceSlot>> taken;
  HoldBlanks({&slot, 1}, &taken);
  return taken.front();
}

std::vector<std::shared_ptr<const DeviceSlot>> DevicePool::Reserve(int count, Duration timeout,
                                                                   int together) {
  std::vector<std::shared_ptr<const DeviceSlot>> taken;
  taken.reserve(static_cast<size_t>(std::max(count, 0)));
  // Holds as many of `slots` as are still wanted and returns the others.
  const auto take = [&](std::span<const uint64_t> slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (static_cast<int>(taken.size()) < count && !slots.empty()) {
      const auto run = std::min(
          {static_cast<size_t>(count) - taken.size(), slots.size(), static_cast<size_t>(together)});
      HoldBlanks(slots.last(run), &taken);
      slots = slots.first(slots.size() - run);
    }
    return slots;
  };
  std::shared_ptr<PoolSession> session;
  {
    MutexLock lock(&mutex_);
    session = session_;
    stock_.resize(take(stock_).size());
    changed_.NotifyAll();
  }
  while (session != nullptr && static_cast<int>(taken.size()) < count) {
    const int wanted = std::min(count - static_cast<int>(taken.size()), kReserveMax);
    const auto more = ReserveMore(*session, wanted, timeout);
    if (!more.ok() || more->empty()) break;
    MutexLock lock(&mutex_);
    if (session_ != session) {
      session->ReleaseLater(*more);
      break;
    }
    // A repeated response may have more slots than this call wants.
    const std::span<const uint64_t> rest = take(*more);
    stock_.insert(stock_.end(), rest.begin(), rest.end());
  }
  return taken;
}

bool DevicePool::WaitBlank(int count, Duration timeout) {
  const TimePoint deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mutex_);
  while (stock_.size() < static_cast<size_t>(count)) {
    if (stopping_ || !changed_.WaitUntil(&mutex_, deadline)) break;
  }
  return stock_.size() >= static_cast<size_t>(count);
}

void DevicePool::EndUses(std::span<const DeviceSlot> slots) {
  MutexLock lock(&mutex_);
  for (const DeviceSlot& slot : slots) EndUseOf(slot.number());
}

void DevicePool::EndUseOf(uint64_t slot) {
  SlotRecord& record = *records_.Find(slot);
  if (record.uses > 1) {
    --record.uses;
    return;
  }
  const std::shared_ptr<PoolSession> held_by = std::move(record.held_by);
  const bool blank = !record.committed;
  records_.Erase(record);
  if (held_by == nullptr) return;
  if (blank && held_by == session_ && !stopping_ &&
      stock_.size() < static_cast<size_t>(options_.blank_slots)) {
    stock_.push_back(slot);  // the next caller takes it
    changed_.NotifyAll();
  } else {
    held_by->ReleaseLater(std::span(&slot, 1));
  }
}

absl::StatusOr<std::vector<CommitOutcome>> DevicePool::Commit(const KeyspaceId& keyspace,
                                                              std::span<const Fragment> fragments,
                                                              Duration timeout) {
  if (fragments.empty()) return std::vector<CommitOutcome>();
  std::vector<uint64_t> slots;
  std::vector<FragmentHeader> headers;
  std::shared_ptr<PoolSession> session;
  {
    MutexLock lock(&mutex_);
    session = session_;
    if (session == nullptr) return absl::UnavailableError("the device pool is not joined");
    for (const Fragment& fragment : fragments) {
      const SlotRecord* record = records_.Find(fragment.slot->number());
      if (record == nullptr || record->committed) {
        return absl::InvalidArgumentError("a slot is not blank");
      }
      if (record->held_by != session) {
        return absl::AbortedError("the connection that reserved a slot was lost");
      }
      slots.push_back(fragment.slot->number());
      headers.push_back(fragment.header);
    }
  }
  auto outcomes = session->Commit(keyspace, slots, headers, timeout);
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < slots.size(); ++i) {
    // Without a response it is unknown whether the slot is blank, so that it is not used as blank
    // again.
    if (outcomes.ok() && (*outcomes)[i] != CommitOutcome::kStored) continue;
    SlotRecord& record = *records_.Find(slots[i]);
    record.committed = true;
    if (!outcomes.ok() || record.withdrawn) continue;
    record.header = std::make_shared<const FragmentHeader>(headers[i]);
  }
  return outcomes;
}

absl::Status DevicePool::CheckLeased(std::span<const DeviceFragment* const> fragments,
                                     const Lease& lease) const {
  for (const DeviceFragment* fragment : fragments) {
    if (fragment->pool != known_) return absl::NotFoundError("a fragment is in another pool");
  }
  // A restarted crumbd holds only the slots that were reported to it, and has given out the others.
  if (lease.epoch() == epoch_) return absl::OkStatus();
  return absl::AbortedError("crumbd has restarted since it gave a lease of a device pool");
}

absl::StatusOr<std::vector<std::shared_ptr<const DeviceSlot>>> DevicePool::Hold(
    std::span<const DeviceFragment* const> fragments, std::shared_ptr<const Lease> lease) {
  std::shared_ptr<PoolSession> session;
  {
    MutexLock lock(&mutex_);
    session = session_;
    CRUMB_RETURN_IF_ERROR(CheckLeased(fragments, *lease));
  }
  for (const DeviceFragment* fragment : fragments) {
    CRUMB_RETURN_IF_ERROR(range_->Reach(session.get(), fragment->slot));
  }
  const auto held = std::make_shared<HeldSlots>(*this, std::move(lease));
  held->slots.reserve(fragments.size());
  std::vector<std::shared_ptr<const DeviceSlot>> slots;
  slots.reserve(fragments.size());
  MutexLock lock(&mutex_);
  CRUMB_RETURN_IF_ERROR(CheckLeased(fragments, *held->lease));
  for (const DeviceFragment* fragment : fragments) {
    slots.emplace_back(
        held, &held->slots.emplace_back(range_->AddressOf(fragment->slot), fragment->slot));
    SlotRecord& record = records_.Use(fragment->slot);
    record.committed = true;
    if (record.withdrawn || record.header != nullptr || !record.encoded_header.empty()) continue;
    record.encoded_header = fragment->header;
    if (!record.encoded_header.empty()) record.encoded_header_owner = held->lease->device_store();
  }
  return slots;
}

absl::StatusOr<std::shared_ptr<PoolSession>> DevicePool::Joined() const {
  MutexLock lock(&mutex_);
  if (session_ == nullptr) return absl::UnavailableError("the device pool is not joined");
  return session_;
}

absl::StatusOr<std::vector<std::optional<FragmentHeader>>> DevicePool::Headers(
    std::span<const uint64_t> slots, Duration timeout) {
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<PoolSession> session, Joined());
  return session->Headers(slots, timeout);
}

absl::Status DevicePool::Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                                  Duration timeout) {
  {
    // A restarted crumbd will learn of the slot, but not of the page.
    MutexLock lock(&mutex_);
    for (const uint64_t slot : slots) {
      SlotRecord* record = records_.Find(slot);
      if (record == nullptr) continue;
      record->withdrawn = true;
      record->header = nullptr;
      record->encoded_header = {};
      record->encoded_header_owner = nullptr;
    }
  }
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<PoolSession> session, Joined());
  return session->Withdraw(slots, keys, timeout);
}

DevicePoolStats DevicePool::stats() const {
  DevicePoolStats stats;
  {
    MutexLock lock(&mutex_);
    stats = stats_;
    stats.blank_slots = stock_.size();
    stats.held_slots = records_.used();
  }
  stats.handles = range_->handles();
  return stats;
}

void DevicePool::OnDemotions(const PoolId& pool, std::vector<Demotion> demotions) {
  MutexLock lock(&mutex_);
  if (pool != known_) return;
  for (Demotion& one : demotions) {
    if (demotions_.size() < kDemotionsMax) demotions_.push_back(std::move(one));
  }
  changed_.NotifyAll();
}

// Returns false if the pool is stopping.
bool DevicePool::Wait() {
  MutexLock lock(&mutex_);
  while (!stopping_) {
    if (join_due_ || (session_ != nullptr && !demotions_.empty())) return true;
    const bool low =
        options_.blank_slots > 0 && stock_.size() * 2 <= static_cast<size_t>(options_.blank_slots);
    const bool wants = session_ == nullptr || low || !former_.empty();
    const TimePoint until = wants ? retry_at_ : TimePoint::max();
    if (Clock::Real().Now() >= until) return true;
    if (until == TimePoint::max()) {
      changed_.Wait(&mutex_);
    } else {
      changed_.WaitUntil(&mutex_, until);
    }
  }
  return false;
}

void DevicePool::Run() {
  while (Wait()) {
    JoinAgain();
    SettleFormer();
    DemoteAll();
    retry_after_ = Refill() ? kRetryMin : std::min(2 * retry_after_, kRetryMax);
    retry_at_ = Clock::Real().Now() + retry_after_;
  }
}

absl::StatusOr<std::vector<uint64_t>> DevicePool::ReserveMore(PoolSession& session, int count,
                                                              Duration timeout) {
  std::vector<uint64_t> slots;
  {
    // A lost response is requested again by its number, so that no other Reserve may be in between.
    MutexLock lock(&reserving_);
    CRUMB_ASSIGN_OR_RETURN(slots, session.Reserve(count, timeout));
  }
  std::vector<uint64_t> unreachable;
  for (const uint64_t slot : slots) {
    if (!range_->Reach(&session, slot).ok()) unreachable.push_back(slot);
  }
  session.ReleaseLater(unreachable);
  std::erase_if(slots, [&](uint64_t slot) {
    return std::find(unreachable.begin(), unreachable.end(), slot) != unreachable.end();
  });
  return slots;
}

bool DevicePool::Refill() {
  std::shared_ptr<PoolSession> session;
  int missing;
  {
    MutexLock lock(&mutex_);
    session = session_;
    missing = options_.blank_slots - static_cast<int>(stock_.size());
    if (session == nullptr) return false;
    if (missing <= 0 || missing * 2 < options_.blank_slots) return true;
  }
  if (!device_full_) device_full_ = !range_->Grow(*session);
  const auto slots = ReserveMore(*session, missing, options_.call_timeout);
  if (!slots.ok()) return false;
  MutexLock lock(&mutex_);
  stock_.insert(stock_.end(), slots->begin(), slots->end());
  changed_.NotifyAll();
  return stock_.size() * 2 > static_cast<size_t>(options_.blank_slots);
}

void DevicePool::DemoteAll() {
  while (true) {
    std::vector<Demotion> batch;
    std::shared_ptr<PoolSession> session;
    {
      MutexLock lock(&mutex_);
      session = session_;
      while (!demotions_.empty() && batch.size() < kDemotionBatch) {
        batch.push_back(std::move(demotions_.front()));
        demotions_.pop_front();
      }
      if (batch.empty() || session == nullptr || stopping_) return;
    }
    uint64_t failed = 0;
    std::vector<uint64_t> slots;
    for (const Demotion& one : batch) {
      slots.push_back(one.slot);
      const absl::Status copied = range_->Reach(session.get(), one.slot).ok()
                                      ? CopyOne(one)
                                      : absl::NotFoundError("no such slot");
      if (!copied.ok()) ++failed;
    }
    session->Demoted(slots).IgnoreError();  // otherwise the session is lost, and crumbd knows that
    MutexLock lock(&mutex_);
    stats_.pages_demoted += batch.size() - failed;
    stats_.demotions_failed += failed;
  }
}

absl::Status DevicePool::CopyOne(const Demotion& demotion) {
  const FragmentHeader& header = demotion.header;
  const size_t tiles_bytes = FragmentTilesBytes(header.range.tiles(), header.tile_bytes);
  const size_t bytes = crumb::FragmentBytes(header.range.tiles(), header.tile_bytes);
  if (tiles_bytes > options_.slot_bytes) return absl::DataLossError("larger than its slot");
  CRUMB_ASSIGN_OR_RETURN(std::vector<StagingSlot> room,
                         client_.Reserve(1, bytes, options_.call_timeout));
  if (room.empty()) return absl::ResourceExhaustedError("staging memory is full");
  const std::span<std::byte> to = room.front().bytes();
  CRUMB_RETURN_IF_ERROR(
      memory_.CopyToHost(range_->AddressOf(demotion.slot), to.first(tiles_bytes)));
  EncodeFragmentHeader(header, to.subspan(tiles_bytes, bytes - tiles_bytes));
  CRUMB_ASSIGN_OR_RETURN(const auto outcomes, client_.Commit(header.keyspace, std::move(room),
                                                             tiles_bytes, options_.call_timeout));
  const bool there = outcomes.front() == CommitOutcome::kStored ||
                     outcomes.front() == CommitOutcome::kDeduplicated;
  return there ? absl::OkStatus() : absl::ResourceExhaustedError("crumbd did not take the copy");
}

}  // namespace crumb::client
