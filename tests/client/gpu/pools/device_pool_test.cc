// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of a pool whose crumbd is restarted at chosen moments, over a model of crumbd that gives a
// slot to others as soon as it is not held.
#include "client/gpu/pools/device_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <set>

#include "client/rpc/pool_link.h"
#include "common/mutex.h"
#include "common/roster.h"
#include "tests/client/memory_client.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

using testing::Contains;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;

constexpr uint64_t kHandle = 2 << 20, kSlot = 256 << 10, kPerHandle = kHandle / kSlot;
constexpr int kBlanks = 2;

// A pool of a crumbd that can be restarted, and the holders of its slots: connections by number,
// leases by 0.
class ModelCrumbd final : public PoolLink {
 public:
  // Called without the lock, once.
  std::function<void()> before_claim, before_mark, before_handles;
  // The connection breaks before the next response of that kind arrives, once.
  std::atomic<bool> lose_reserve{false}, lose_claim{false};

  absl::StatusOr<JoinedPool> Join(const PoolJoin& request) override;
  absl::StatusOr<uint64_t> Reclaim(const DeviceUuid&, uint64_t) override { return 0; }
  absl::Status Listen(const PoolName&, PoolListener* listener) override {
    MutexLock lock(&listening_);
    listener_ = listener;
    return absl::OkStatus();
  }
  void StopListening(PoolListener*) override {
    MutexLock lock(&listening_);
    listener_ = nullptr;
  }

  // Replaces crumbd by one that knows nothing; connected processes reconnect.
  void Restart() {
    {
      MutexLock lock(&mutex_);
      ++epoch_;
      ++connection_;
      recovering_ = true;
      handles_.clear();
      holders_.clear();
    }
    NotifyConnected();
  }
  // Breaks the connection only.
  void Reconnect() {
    {
      MutexLock lock(&mutex_);
      ++connection_;
    }
    NotifyConnected();
  }
  void Stop() {
    MutexLock lock(&mutex_);
    ++connection_;
    down_ = true;
  }
  void Start() {
    {
      MutexLock lock(&mutex_);
      down_ = false;
    }
    Restart();
  }

  // Another worker gives the pool a handle.
  void AddHandle(uint32_t number, UniqueFd fd) {
    MutexLock lock(&mutex_);
    handles_[number] = std::move(fd);
  }
  // Leases a fragment in the slot, as an Acquire would.
  std::shared_ptr<const Lease> LeaseOf(uint64_t slot) {
    MutexLock lock(&mutex_);
    holders_[slot].insert(kLease);
    const std::shared_ptr<void> hold(nullptr, [this, slot, epoch = epoch_](void*) {
      MutexLock ending(&mutex_);
      if (epoch_ == epoch) holders_[slot].erase(kLease);
    });
    DeviceFragment fragment;
    fragment.pool = id_;
    fragment.slot = slot;
    return std::make_shared<const Lease>(std::vector<LeasedFragment>(),
                                         std::vector<DeviceFragment>{fragment}, nullptr, epoch_,
                                         hold);
  }

  uint64_t epoch() const {
    MutexLock lock(&mutex_);
    return epoch_;
  }
  int connection() const {
    MutexLock lock(&mutex_);
    return connection_;
  }
  // Slots whose claims named the page in them.
  std::set<uint64_t> claimed_pages() const {
    MutexLock lock(&mutex_);
    return claimed_pages_;
  }
  // Returns whether the mark was reported over the present connection.
  bool KnowsMark() const {
    MutexLock lock(&mutex_);
    return mark_connection_ == connection_;
  }
  // Slots that another worker could get; none while a process may still claim its slots.
  std::set<uint64_t> Free() const {
    MutexLock lock(&mutex_);
    return FreeLocked();
  }
  std::set<int> HoldersOf(uint64_t slot) const {
    MutexLock lock(&mutex_);
    const auto found = holders_.find(slot);
    return found == holders_.end() ? std::set<int>() : found->second;
  }

 private:
  class Session;
  static constexpr int kLease = 0;

  void NotifyConnected() {
    MutexLock lock(&listening_);
    if (listener_ != nullptr) listener_->OnConnected();
  }
  std::set<uint64_t> FreeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::set<uint64_t> free;
    for (const auto& [number, fd] : handles_) {
      for (uint64_t slot = number * kPerHandle; slot < (number + 1) * kPerHandle; ++slot) {
        const auto holders = holders_.find(slot);
        const bool held = holders != holders_.end() && !holders->second.empty();
        if (!recovering_ && !held) free.insert(slot);
      }
    }
    return free;
  }
  std::vector<PoolHandle> HandlesFrom(uint32_t first) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<PoolHandle> found;
    for (auto one = handles_.lower_bound(first); one != handles_.end(); ++one) {
      found.push_back({one->first, UniqueFd(::dup(one->second.get()))});
    }
    return found;
  }
  static void Call(std::function<void()>& hook) {
    if (hook) std::exchange(hook, nullptr)();
  }

  const PoolId id_ = PoolId::FromBytes("a pool of 16 byt");
  const UniqueFd roster_ = CreateRoster().value();
  mutable Mutex mutex_;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 1;
  int connection_ ABSL_GUARDED_BY(mutex_) = 1;
  int mark_connection_ ABSL_GUARDED_BY(mutex_) =
      0;  // the connection over which the mark was reported last
  bool down_ ABSL_GUARDED_BY(mutex_) = false;
  bool recovering_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint32_t, UniqueFd> handles_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::set<int>> holders_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> claimed_pages_ ABSL_GUARDED_BY(mutex_);
  Mutex listening_;
  PoolListener* listener_ ABSL_GUARDED_BY(listening_) = nullptr;
};

class ModelCrumbd::Session final : public PoolSession {
 public:
  Session(ModelCrumbd& crumbd, uint64_t epoch, int connection, std::vector<PoolHandle> handles)
      : crumbd_(crumbd), epoch_(epoch), connection_(connection), handles_(std::move(handles)) {}

  const PoolId& id() const override { return crumbd_.id_; }
  uint64_t epoch() const override { return epoch_; }
  const std::string& holder() const override { return holder_; }
  bool connected() const override {
    MutexLock lock(&crumbd_.mutex_);
    return ConnectedLocked();
  }
  std::vector<PoolHandle> TakeFirstHandles() override { return std::move(handles_); }
  absl::StatusOr<std::vector<PoolHandle>> Handles(uint32_t first) override {
    Call(crumbd_.before_handles);
    MutexLock lock(&crumbd_.mutex_);
    return crumbd_.HandlesFrom(first);
  }
  absl::StatusOr<uint32_t> Offer(int fd, uint64_t bytes_max) override {
    MutexLock lock(&crumbd_.mutex_);
    if (!ConnectedLocked()) return absl::UnavailableError("");
    if ((crumbd_.handles_.size() + 1) * kHandle > bytes_max) {
      return absl::ResourceExhaustedError("");
    }
    const auto number = static_cast<uint32_t>(crumbd_.handles_.size());
    crumbd_.handles_[number] = UniqueFd(::dup(fd));
    return number;
  }
  absl::Status OfferAgain(int fd, uint32_t number) override {
    MutexLock lock(&crumbd_.mutex_);
    if (!ConnectedLocked()) return absl::UnavailableError("");
    crumbd_.handles_[number] = UniqueFd(::dup(fd));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<bool>> Claim(const KeyspaceId& keyspace,
                                          std::span<const SlotClaim> claims) override {
    Call(crumbd_.before_claim);
    {
      MutexLock lock(&crumbd_.mutex_);
      if (!ConnectedLocked()) return absl::UnavailableError("");
      if (!crumbd_.recovering_) return absl::FailedPreconditionError("");
      for (const SlotClaim& claim : claims) {
        if (claim.header.has_value()) crumbd_.claimed_pages_.insert(claim.slot);
      }
      if (keyspace != KeyspaceId()) return absl::NotFoundError("no worker has opened it yet");
      for (const SlotClaim& claim : claims) crumbd_.holders_[claim.slot].insert(connection_);
    }
    if (!crumbd_.lose_claim.exchange(false)) return std::vector<bool>(claims.size(), true);
    crumbd_.Reconnect();
    return absl::UnavailableError("the connection is lost");
  }
  absl::Status ReportMark(uint64_t mark) override {
    EXPECT_NE(mark, 0u);
    Call(crumbd_.before_mark);
    MutexLock lock(&crumbd_.mutex_);
    if (!ConnectedLocked()) return absl::UnavailableError("");
    crumbd_.recovering_ = false;  // no other process uses the pool
    crumbd_.mark_connection_ = connection_;
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<uint64_t>> Reserve(int count, Duration) override {
    std::vector<uint64_t> slots;
    {
      MutexLock lock(&crumbd_.mutex_);
      if (!ConnectedLocked()) return absl::UnavailableError("");
      for (const uint64_t slot : crumbd_.FreeLocked()) {
        if (static_cast<int>(slots.size()) == count) break;
        crumbd_.holders_[slot].insert(connection_);
        slots.push_back(slot);
      }
    }
    if (!crumbd_.lose_reserve.exchange(false)) return slots;
    crumbd_.Reconnect();
    return absl::UnavailableError("the connection is lost");
  }
  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId&,
                                                    std::span<const uint64_t> slots,
                                                    std::span<const FragmentHeader>,
                                                    Duration) override {
    MutexLock lock(&crumbd_.mutex_);
    if (!ConnectedLocked()) return absl::UnavailableError("");
    return std::vector<CommitOutcome>(slots.size(), CommitOutcome::kStored);
  }
  // Reaches crumbd even after the connection was lost, as long as it is the same crumbd.
  void ReleaseLater(std::span<const uint64_t> slots) override {
    MutexLock lock(&crumbd_.mutex_);
    if (epoch_ != crumbd_.epoch_) return;
    for (const uint64_t slot : slots) crumbd_.holders_[slot].erase(connection_);
  }
  absl::Status ReleaseAllBut(std::span<const uint64_t> slots) override {
    MutexLock lock(&crumbd_.mutex_);
    if (crumbd_.down_) return absl::UnavailableError("");
    if (epoch_ != crumbd_.epoch_) return absl::UnauthenticatedError("no such session");
    EXPECT_FALSE(ConnectedLocked());
    for (auto& [slot, holders] : crumbd_.holders_) {
      if (std::find(slots.begin(), slots.end(), slot) == slots.end()) holders.erase(connection_);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration) override {
    return std::vector<std::optional<FragmentHeader>>(slots.size());
  }
  absl::Status Withdraw(std::span<const uint64_t>, std::span<const PageKey>, Duration) override {
    return absl::OkStatus();
  }
  absl::Status Demoted(std::span<const uint64_t>) override { return absl::OkStatus(); }
  void Leave() override {}

 private:
  bool ConnectedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(crumbd_.mutex_) {
    return connection_ == crumbd_.connection_;
  }

  ModelCrumbd& crumbd_;
  const uint64_t epoch_;
  const int connection_;
  const std::string holder_ = std::to_string(connection_);
  std::vector<PoolHandle> handles_;
};

absl::StatusOr<JoinedPool> ModelCrumbd::Join(const PoolJoin&) {
  MutexLock lock(&mutex_);
  if (down_) return absl::UnavailableError("no crumbd");
  JoinedPool joined;
  joined.session = std::make_shared<Session>(*this, epoch_, connection_, HandlesFrom(0));
  joined.roster = UniqueFd(::dup(roster_.get()));
  return joined;
}

class DevicePoolTest : public testing::Test {
 protected:
  DevicePoolTest() {
    client_.link = &crumbd_;
    pool_ = Open();
    EXPECT_TRUE(pool_->WaitBlank(kBlanks, std::chrono::seconds(60)));
  }

  std::unique_ptr<DevicePool> Open() {
    return DevicePool::Open({.slot_bytes = kSlot,
                             .handle_bytes = kHandle,
                             .bytes_max = kHandle,
                             .range_bytes = 8 * kHandle,
                             .blank_slots = kBlanks},
                            *memory_, client_)
        .value();
  }
  // Blocks until the pool is joined over the present connection.
  void AwaitJoined() {
    EXPECT_TRUE(Eventually([&] {
      return crumbd_.KnowsMark() && pool_->id() != PoolId() &&
             pool_->stats().blank_slots == kBlanks;
    }));
  }
  // Returns a slot that is not held.
  uint64_t AnyFree() {
    const auto free = crumbd_.Free();
    EXPECT_THAT(free, Not(IsEmpty()));
    return free.empty() ? 0 : *free.begin();
  }
  absl::StatusOr<std::vector<std::shared_ptr<const DeviceSlot>>> Hold(
      const std::shared_ptr<const Lease>& lease) {
    const DeviceFragment* const fragment = &lease->device_fragments().front();
    return pool_->Hold({&fragment, 1}, lease);
  }

  ModelCrumbd crumbd_;
  MemoryClient client_;
  const std::unique_ptr<DeviceMemory> memory_ = DeviceMemory::OpenHost({});
  std::unique_ptr<DevicePool> pool_;
};

TEST_F(DevicePoolTest, ALeaseHoldsItsSlotAsLongAsTheSlotIsHeld) {
  const uint64_t slot = AnyFree();
  auto lease = crumbd_.LeaseOf(slot);
  auto held = Hold(lease);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(held->front()->number(), slot);
  lease.reset();
  EXPECT_THAT(crumbd_.Free(), Not(Contains(slot)));
  held->clear();
  EXPECT_THAT(crumbd_.Free(), Contains(slot));
}

// Slots that are held while there is no crumbd are reported to the next one.
TEST_F(DevicePoolTest, ALeaseOfTheFormerCrumbdHoldsUntilTheNextKnowsThePool) {
  const uint64_t slot = AnyFree();
  const auto lease = crumbd_.LeaseOf(slot);
  crumbd_.Stop();
  auto held = Hold(lease);
  ASSERT_TRUE(held.ok()) << held.status();
  crumbd_.Start();
  AwaitJoined();
  EXPECT_THAT(crumbd_.Free(), Not(Contains(slot)));
  held->clear();
  EXPECT_THAT(crumbd_.Free(), Contains(slot));
}

// A lease of the former crumbd holds nothing any more after held slots were reported to the next
// crumbd, because that may reserve the other slots.
TEST_F(DevicePoolTest, ALeaseOfTheFormerCrumbdIsRefusedOnceTheNextKnowsThePool) {
  const auto kept = pool_->TakeBlank();
  ASSERT_NE(kept, nullptr);
  for (const bool claims_sent : {false, true}) {
    SCOPED_TRACE(claims_sent ? "before the roster's mark is sent" : "before the claims are sent");
    AwaitJoined();
    const uint64_t slot = AnyFree();
    const auto lease = crumbd_.LeaseOf(slot);
    absl::StatusOr<std::vector<std::shared_ptr<const DeviceSlot>>> held;
    bool called = false;
    (claims_sent ? crumbd_.before_mark : crumbd_.before_claim) = [&] {
      held = Hold(lease);
      called = true;
    };
    crumbd_.Restart();
    AwaitJoined();
    ASSERT_TRUE(called);
    EXPECT_TRUE(absl::IsAborted(held.status())) << held.status();
    EXPECT_TRUE(!held.ok() || !crumbd_.Free().contains(slot))
        << "others are given slot " << slot << ", which is in use here";
    const auto late = Hold(lease);
    EXPECT_TRUE(absl::IsAborted(late.status())) << late.status();
    EXPECT_THAT(crumbd_.HoldersOf(kept->number()), UnorderedElementsAre(crumbd_.connection()));
    // A lease of the new crumbd is valid.
    EXPECT_TRUE(Hold(crumbd_.LeaseOf(slot)).ok());
  }
}

// The restart comes while a Hold requests the handle that the slot lies in.
TEST_F(DevicePoolTest, ALeaseIsRefusedThatARestartOvertook) {
  auto others = memory_->Allocate(kHandle).value();
  crumbd_.AddHandle(1, others->Export().value());
  const uint64_t slot = kPerHandle + 3;  // not mapped here yet
  const auto lease = crumbd_.LeaseOf(slot);
  const int former = crumbd_.connection();
  crumbd_.before_handles = [&] {
    crumbd_.Restart();
    AwaitJoined();
    crumbd_.AddHandle(1, others->Export().value());
  };
  const auto held = Hold(lease);
  ASSERT_NE(crumbd_.connection(), former);
  EXPECT_TRUE(absl::IsAborted(held.status())) << held.status();
  EXPECT_THAT(crumbd_.Free(), Contains(slot));
  EXPECT_EQ(pool_->stats().held_slots, 0u);
}

// A lost connection releases no slot, because crumbd still knows all leases.
TEST_F(DevicePoolTest, ALeaseOutlivesItsConnection) {
  const uint64_t slot = AnyFree();
  const auto lease = crumbd_.LeaseOf(slot);
  crumbd_.Reconnect();
  AwaitJoined();
  auto held = Hold(lease);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_THAT(crumbd_.Free(), Not(Contains(slot)));
}

// Slots that crumbd reserved, and whose response was lost with its connection, become free again;
// slots in use stay.
TEST_F(DevicePoolTest, SlotsOfALostReserveAreGivenBack) {
  auto used = pool_->TakeBlank();
  ASSERT_NE(used, nullptr);
  const int former = crumbd_.connection();
  crumbd_.lose_reserve = true;
  const auto taken = pool_->Reserve(kBlanks + 2, std::chrono::seconds(20));
  ASSERT_FALSE(crumbd_.lose_reserve);
  ASSERT_NE(crumbd_.connection(), former);
  AwaitJoined();
  std::set<uint64_t> in_use = {used->number()};
  for (const auto& slot : taken) in_use.insert(slot->number());
  EXPECT_TRUE(Eventually([&] {
    for (uint64_t slot = 0; slot < kPerHandle; ++slot) {
      if (!in_use.contains(slot) && crumbd_.HoldersOf(slot).contains(former)) return false;
    }
    return true;
  }));
  EXPECT_THAT(crumbd_.HoldersOf(used->number()), UnorderedElementsAre(former));
  const uint64_t number = used->number();
  used.reset();
  EXPECT_TRUE(Eventually([&] { return crumbd_.HoldersOf(number).count(former) == 0; }));
}

TEST_F(DevicePoolTest, SlotsOfALostClaimAreHeldOnce) {
  const auto used = pool_->TakeBlank();
  ASSERT_NE(used, nullptr);
  crumbd_.lose_claim = true;
  crumbd_.Restart();
  AwaitJoined();
  ASSERT_FALSE(crumbd_.lose_claim);
  EXPECT_TRUE(Eventually(
      [&] { return crumbd_.HoldersOf(used->number()) == std::set<int>{crumbd_.connection()}; }));
}

// The next crumbd holds the slot of a damaged page, and does not know the page.
TEST_F(DevicePoolTest, AWithdrawnPageIsNotReportedToTheNextCrumbd) {
  std::vector<DevicePool::Fragment> fragments;
  for (uint8_t i = 0; i < 2; ++i) {
    DevicePool::Fragment& fragment = fragments.emplace_back();
    fragment.slot = pool_->TakeBlank();
    ASSERT_NE(fragment.slot, nullptr);
    fragment.header.keyspace.bytes[0] = 7;
    fragment.header.key.bytes[0] = i;
  }
  const uint64_t sound = fragments[0].slot->number(), damaged = fragments[1].slot->number();
  ASSERT_TRUE(
      pool_->Commit(fragments[0].header.keyspace, fragments, std::chrono::seconds(20)).ok());
  ASSERT_TRUE(
      pool_->Withdraw({&damaged, 1}, {&fragments[1].header.key, 1}, std::chrono::seconds(20)).ok());
  crumbd_.Restart();
  AwaitJoined();
  EXPECT_THAT(crumbd_.claimed_pages(), UnorderedElementsAre(sound));
  for (const uint64_t slot : {sound, damaged}) {
    EXPECT_THAT(crumbd_.HoldersOf(slot), UnorderedElementsAre(crumbd_.connection()));
  }
}

// A device with memory for fewer handles than the pool may have, or for none.
TEST_F(DevicePoolTest, AFullDeviceLeavesThePoolSmaller) {
  pool_.reset();
  for (const uint64_t handles : {1, 0}) {
    SCOPED_TRACE(handles);
    crumbd_.Restart();  // the pool's handles are lost
    const auto memory = DeviceMemory::OpenHost({.name = "full", .bytes_max = handles * kHandle});
    const auto pool = DevicePool::Open({.slot_bytes = kSlot,
                                        .handle_bytes = kHandle,
                                        .bytes_max = 4 * kHandle,
                                        .range_bytes = 8 * kHandle,
                                        .blank_slots = kBlanks},
                                       *memory, client_)
                          .value();
    ASSERT_TRUE(Eventually([&] { return pool->id() != PoolId(); }));
    const uint64_t slots = handles * kPerHandle;
    std::vector<std::shared_ptr<const DeviceSlot>> taken;
    EXPECT_TRUE(Eventually([&] {
      if (auto slot = pool->TakeBlank()) taken.push_back(std::move(slot));
      return taken.size() == slots;
    }));
    const uint64_t out = pool->stats().out_of_slots;
    EXPECT_EQ(pool->TakeBlank(), nullptr);
    EXPECT_EQ(pool->stats().out_of_slots, out + 1);
    EXPECT_THAT(pool->Reserve(4, std::chrono::seconds(1)), IsEmpty());
    EXPECT_EQ(pool->stats().handles, handles);
    std::set<DeviceAddress> places;
    for (const auto& slot : taken) places.insert(slot->address());
    EXPECT_EQ(places.size(), slots);
    if (slots == 0) continue;
    const uint64_t back = taken.back()->number();
    taken.pop_back();
    const auto again = pool->TakeBlank();
    ASSERT_NE(again, nullptr);
    EXPECT_EQ(again->number(), back);
  }
}

// crumbd dies again, or the connection breaks, between the claims and the roster's mark. The next
// crumbd learns nothing of claims made to the one before, and the same crumbd holds claimed slots
// once.
TEST_F(DevicePoolTest, ClaimsAndTheRostersMarkReachOneCrumbd) {
  const auto kept = pool_->TakeBlank();
  ASSERT_NE(kept, nullptr);
  for (const bool restarts : {true, false}) {
    SCOPED_TRACE(restarts ? "crumbd dies" : "the connection breaks");
    AwaitJoined();
    int calls = 0;
    crumbd_.before_mark = [&] {
      ++calls;
      restarts ? crumbd_.Restart() : crumbd_.Reconnect();
    };
    crumbd_.Restart();
    AwaitJoined();
    EXPECT_EQ(calls, 1);
    EXPECT_THAT(crumbd_.Free(), Not(Contains(kept->number())));
    EXPECT_THAT(crumbd_.HoldersOf(kept->number()), UnorderedElementsAre(crumbd_.connection()));
  }
}

}  // namespace
}  // namespace crumb::client
