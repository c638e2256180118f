// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of a pool's handles in the ranges of two processes, over a session that keeps descriptors
// as crumbd does.
#include "client/gpu/pools/pool_range.h"

#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>

#include "gtest/gtest.h"

namespace crumb::client {
namespace {

constexpr uint64_t kHandle = 2 << 20, kSlot = 768 << 10;  // two slots per handle, with a rest
constexpr PoolRangeOptions kOptions{.slot_bytes = kSlot,
                                    .handle_bytes = kHandle,
                                    .bytes_max = 3 * kHandle,
                                    .range_bytes = 8 * kHandle};

// A session that keeps the handles of one pool.
class KeptHandles final : public PoolSession, public PoolLink {
 public:
  std::map<uint32_t, UniqueFd> handles;
  uint32_t next = 0;
  absl::Status offers;             // the result of Offer, unless it takes the handle
  std::function<uint64_t()> give;  // the bytes that Reclaim frees
  int requested = 0;               // number of calls of Handles

  std::vector<PoolHandle> From(uint32_t first) const {
    std::vector<PoolHandle> found;
    for (const auto& [number, fd] : handles) {
      if (number >= first) found.push_back({number, UniqueFd(::dup(fd.get()))});
    }
    return found;
  }

  const PoolId& id() const override { return id_; }
  uint64_t epoch() const override { return 1; }
  const std::string& holder() const override { return holder_; }
  bool connected() const override { return true; }
  std::vector<PoolHandle> TakeFirstHandles() override { return From(0); }
  absl::StatusOr<std::vector<PoolHandle>> Handles(uint32_t first) override {
    ++requested;
    return From(first);
  }
  absl::StatusOr<uint32_t> Offer(int fd, uint64_t bytes_max) override {
    if (!offers.ok()) return offers;
    EXPECT_LE((handles.size() + 1) * kHandle, bytes_max);
    handles.emplace(next, UniqueFd(::dup(fd)));
    return next++;
  }
  absl::Status OfferAgain(int fd, uint32_t number) override {
    if (!offers.ok()) return offers;
    handles.emplace(number, UniqueFd(::dup(fd)));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<bool>> Claim(const KeyspaceId&, std::span<const SlotClaim>) override {
    return absl::UnimplementedError("");
  }
  absl::Status ReportMark(uint64_t) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<uint64_t>> Reserve(int, Duration) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId&, std::span<const uint64_t>,
                                                    std::span<const FragmentHeader>,
                                                    Duration) override {
    return absl::UnimplementedError("");
  }
  void ReleaseLater(std::span<const uint64_t>) override {}
  absl::Status ReleaseAllBut(std::span<const uint64_t>) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(std::span<const uint64_t>,
                                                                     Duration) override {
    return absl::UnimplementedError("");
  }
  absl::Status Withdraw(std::span<const uint64_t>, std::span<const PageKey>, Duration) override {
    return absl::UnimplementedError("");
  }
  absl::Status Demoted(std::span<const uint64_t>) override { return absl::OkStatus(); }
  void Leave() override {}

  absl::StatusOr<JoinedPool> Join(const PoolJoin&) override { return absl::UnimplementedError(""); }
  absl::StatusOr<uint64_t> Reclaim(const DeviceUuid&, uint64_t bytes) override {
    EXPECT_EQ(bytes, kHandle);
    return give ? give() : 0;
  }
  absl::Status Listen(const PoolName&, PoolListener*) override { return absl::OkStatus(); }
  void StopListening(PoolListener*) override {}

 private:
  const PoolId id_{};
  const std::string holder_;
};

class PoolRangeTest : public testing::Test {
 protected:
  std::unique_ptr<PoolRange> Open(DeviceMemory& memory) {
    auto range = PoolRange::Open(kOptions, memory, crumbd_);
    EXPECT_TRUE(range.ok()) << range.status();
    return std::move(range).value();
  }
  static char* At(const PoolRange& range, uint64_t slot) {
    return reinterpret_cast<char*>(range.AddressOf(slot));
  }

  KeptHandles crumbd_;
  const std::unique_ptr<DeviceMemory> memory_ = DeviceMemory::OpenHost({});
};

TEST_F(PoolRangeTest, SlotsHaveTheirPlacesByNumber) {
  const auto range = Open(*memory_);
  EXPECT_EQ(range->AddressOf(0), range->base());
  EXPECT_EQ(range->AddressOf(1), range->base() + kSlot);
  EXPECT_EQ(range->AddressOf(2), range->base() + kHandle);  // no slot spans two handles
  EXPECT_EQ(range->AddressOf(5), range->base() + 2 * kHandle + kSlot);
}

TEST_F(PoolRangeTest, GrowsToItsSizeAndOthersSeeTheSameMemory) {
  const auto writer = Open(*memory_), reader = Open(*memory_);
  EXPECT_TRUE(writer->Grow(crumbd_));
  EXPECT_EQ(writer->handles(), 3u);
  EXPECT_EQ(crumbd_.handles.size(), 3u);
  for (uint64_t slot = 0; slot < 6; ++slot) {
    ASSERT_TRUE(writer->Reach(nullptr, slot).ok());
    std::memset(At(*writer, slot), 'a' + static_cast<int>(slot), kSlot);
  }
  ASSERT_TRUE(reader->Reach(&crumbd_, 3).ok());  // also maps the handles behind it
  EXPECT_EQ(reader->handles(), 2u);
  EXPECT_EQ(*At(*reader, 3), 'd');
  EXPECT_EQ(At(*reader, 5)[kSlot - 1], 'f');
  ASSERT_TRUE(reader->Reach(&crumbd_, 0).ok());
  EXPECT_EQ(At(*reader, 1)[0], 'b');
  const int requested = crumbd_.requested;
  for (uint64_t slot = 0; slot < 6; ++slot) ASSERT_TRUE(reader->Reach(&crumbd_, slot).ok());
  EXPECT_EQ(crumbd_.requested, requested);
}

TEST_F(PoolRangeTest, SlotsThatThereAreNot) {
  const auto range = Open(*memory_);
  EXPECT_TRUE(range->Grow(crumbd_));
  EXPECT_TRUE(absl::IsNotFound(range->Reach(&crumbd_, 6)));   // a handle that was never offered
  EXPECT_TRUE(absl::IsNotFound(range->Reach(&crumbd_, 16)));  // exceeds the range
  EXPECT_TRUE(absl::IsNotFound(range->Reach(&crumbd_, UINT64_MAX)));
  EXPECT_TRUE(absl::IsUnavailable(range->Reach(nullptr, 6)));
}

TEST_F(PoolRangeTest, GrowsAsFarAsThereIsMemory) {
  const auto memory = DeviceMemory::OpenHost({.name = "small", .bytes_max = 2 * kHandle});
  const auto range = Open(*memory);
  EXPECT_FALSE(range->Grow(crumbd_));
  EXPECT_EQ(range->handles(), 2u);

  // If nothing is freed, it requests once and tries again the next time.
  int reclaimed = 0;
  crumbd_.give = [&] {
    ++reclaimed;
    return uint64_t{0};
  };
  EXPECT_FALSE(range->Grow(crumbd_));
  EXPECT_EQ(reclaimed, 1);
}

TEST_F(PoolRangeTest, MemoryThatIsReclaimedIsUsed) {
  const auto memory = DeviceMemory::OpenHost({.name = "small", .bytes_max = 3 * kHandle});
  auto unused = memory->Allocate(kHandle);
  ASSERT_TRUE(unused.ok());
  crumbd_.give = [&] {
    unused->reset();
    return kHandle;
  };
  const auto range = Open(*memory);
  EXPECT_TRUE(range->Grow(crumbd_));
  EXPECT_EQ(range->handles(), 3u);
}

TEST_F(PoolRangeTest, WhatCrumbdDoesNotTakeIsNotMapped) {
  const auto range = Open(*memory_);
  for (const auto& status :
       {absl::ResourceExhaustedError("others did"), absl::UnavailableError("")}) {
    crumbd_.offers = status;
    EXPECT_TRUE(range->Grow(crumbd_));
    EXPECT_EQ(range->handles(), 0u);
  }
}

TEST_F(PoolRangeTest, ARestartedCrumbdGetsWhatItLacks) {
  const auto range = Open(*memory_);
  EXPECT_TRUE(range->Grow(crumbd_));
  std::memset(At(*range, 2), 'x', kSlot);
  crumbd_.handles.erase(1);
  EXPECT_TRUE(range->OfferAll(crumbd_, crumbd_.From(0)).ok());
  ASSERT_EQ(crumbd_.handles.size(), 3u);
  const auto other = Open(*memory_);
  ASSERT_TRUE(other->MapAll(crumbd_.From(0)).ok());
  EXPECT_EQ(*At(*other, 2), 'x');

  crumbd_.handles.clear();
  crumbd_.offers = absl::AlreadyExistsError("another process did");
  EXPECT_TRUE(range->OfferAll(crumbd_, {}).ok());
  crumbd_.offers = absl::UnavailableError("gone");
  EXPECT_TRUE(absl::IsUnavailable(range->OfferAll(crumbd_, {})));
}

TEST_F(PoolRangeTest, DescriptorsOfOtherThingsAreRefused) {
  const auto range = Open(*memory_);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const UniqueFd to(ends[1]);
  std::vector<PoolHandle> handles;
  handles.push_back({0, UniqueFd(ends[0])});
  EXPECT_TRUE(absl::IsDataLoss(range->MapAll(std::move(handles))));
  EXPECT_EQ(range->handles(), 0u);
}

}  // namespace
}  // namespace crumb::client
