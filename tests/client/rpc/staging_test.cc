// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Reserve and Commit of a Client, over a session's staging socket and over gRPC.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "common/crc32c.h"
#include "crumb/client.h"
#include "crumbd_test.h"
#include "gmock/gmock.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Each;
using testing::SizeIs;

class StagingTest : public CrumbdTest {
 protected:
  // Starts a crumbd whose sessions have both sockets, or none, and a client of it.
  void Start(bool sockets = true) {
    StartCrumbd(7);
    crumbd_->call_sockets = sockets;
    crumbd_->staging_sockets = sockets;
    client_ = OpenClient();
    KeyspaceSpec spec;
    spec.fields = {{"model", "test"}, {"format", "int2"}};
    spec.layers = 1;
    spec.kv_heads = 1;
    spec.head_dim = 64;
    spec.group_size = 64;
    keyspace_ = client_->OpenKeyspace(spec, seconds(5)).value();
  }

  size_t tiles_bytes() const { return keyspace_.int2_tile_bytes; }
  static PageKey Key(int number) {
    PageKey key;
    std::memcpy(key.bytes.data(), &number, sizeof(number));
    key.bytes[31] = 1;
    return key;
  }
  std::vector<StagingSlot> Reserved(int count) {
    auto slots =
        client_->Reserve(count, crumb::FragmentBytes(1, keyspace_.int2_tile_bytes), seconds(20));
    EXPECT_TRUE(slots.ok()) << slots.status();
    return *std::move(slots);
  }
  // Writes page `number` to a slot.
  void Write(const StagingSlot& slot, int number) const {
    FragmentHeader header;
    header.tile_bytes = keyspace_.int2_tile_bytes;
    header.generation = keyspace_.generation;
    header.keyspace = keyspace_.id;
    header.key = Key(number);
    header.range = {{0, 1}, {0, 1}};
    const auto tiles = slot.bytes().first(tiles_bytes());
    std::fill(tiles.begin(), tiles.end(), static_cast<std::byte>(number));
    header.tile_sums = {Crc32c(tiles)};
    EncodeFragmentHeader(header, slot.bytes().subspan(tiles.size()));
  }
  std::unique_ptr<PendingCommit> StartCommit(std::vector<StagingSlot> slots,
                                             Duration timeout = seconds(20)) {
    return client_->StartCommit(keyspace_.id, std::move(slots), tiles_bytes(), timeout);
  }

  std::unique_ptr<Client> client_;
  KeyspaceInfo keyspace_;
};

TEST_F(StagingTest, GoesOverItsSocketOrWithoutOneOverGrpc) {
  for (const bool sockets : {true, false}) {
    Start(sockets);
    auto slots = Reserved(3);
    ASSERT_THAT(slots, SizeIs(3));
    EXPECT_EQ(crumbd_->reservations(), 3u);
    for (int i = 0; i < 3; ++i) Write(slots[static_cast<size_t>(i)], i + 1);
    const auto outcomes =
        client_->Commit(keyspace_.id, std::move(slots), tiles_bytes(), seconds(20)).value();
    EXPECT_THAT(outcomes, SizeIs(3));
    EXPECT_THAT(outcomes, Each(CommitOutcome::kStored));
    EXPECT_THAT(crumbd_->pages(), SizeIs(3));
    EXPECT_EQ(crumbd_->reservations(), 0u);
    EXPECT_EQ(crumbd_->staging_calls(), sockets ? 2u : 0u);
    client_.reset();
    crumbd_.reset();
  }
}

TEST_F(StagingTest, CallsBesideACommitWaitForNoneOfIt) {
  Start();
  auto slots = Reserved(1);
  Write(slots[0], 1);
  crumbd_->block_commit = true;
  auto pending = StartCommit(std::move(slots));
  const std::vector<PageKey> keys = {Key(1)};
  AcquireRequest request;
  request.keyspace = keyspace_.id;
  request.generation = keyspace_.generation;
  request.keys = keys;
  request.timeout = seconds(20);
  EXPECT_EQ(client_->Acquire(request)->hit_pages, 0);
  EXPECT_EQ(crumbd_->socket_calls(), 1u);
  EXPECT_THAT(Reserved(1), SizeIs(1));  // over gRPC
  // The Commit was sent, and crumbd may read it later than the Reserve.
  EXPECT_TRUE(Eventually([&] { return crumbd_->staging_calls() == 2; }));
  crumbd_->block_commit = false;
  EXPECT_THAT(pending->Finish().value(), testing::ElementsAre(CommitOutcome::kStored));
  EXPECT_EQ(client_->Acquire(request)->hit_pages, 1);
  EXPECT_THAT(Reserved(1), SizeIs(1));  // the socket is free again
  EXPECT_EQ(crumbd_->staging_calls(), 3u);
  EXPECT_TRUE(Eventually([&] { return crumbd_->reservations() == 0; }));
}

TEST_F(StagingTest, LargeCallsGoOverGrpc) {
  Start();
  EXPECT_THAT(Reserved(257), SizeIs(257));
  EXPECT_EQ(crumbd_->staging_calls(), 0u);
  EXPECT_THAT(Reserved(256), SizeIs(256));
  EXPECT_EQ(crumbd_->staging_calls(), 1u);
  EXPECT_TRUE(Eventually([&] { return crumbd_->reservations() == 0; }));
}

// crumbd frees the room of a Commit that it has received. An Abort of it would free the room of
// the caller that has reserved it since.
TEST_F(StagingTest, ACommitThatIsGivenUpAbortsNothing) {
  Start();
  for (const bool dropped : {false, true}) {
    auto slots = Reserved(1);
    Write(slots[0], dropped ? 2 : 1);
    const uint64_t offset = slots[0].offset();
    crumbd_->block_commit = true;
    auto pending = StartCommit(std::move(slots), milliseconds(1));
    if (!dropped) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(pending->Finish().status()));
    }
    pending.reset();
    crumbd_->block_commit = false;
    const size_t pages = dropped ? 2 : 1;
    ASSERT_TRUE(Eventually([&] { return crumbd_->pages().size() == pages; }));
    auto again = Reserved(1);
    EXPECT_EQ(again[0].offset(), offset);
    // The reconnector's queue is in order: room that is given back now comes behind an Abort
    // before.
    Reserved(1).clear();
    EXPECT_TRUE(Eventually([&] { return crumbd_->reservations() == 1; }));
    Write(again[0], 1);
    EXPECT_THAT(StartCommit(std::move(again))->Finish().value(),
                testing::ElementsAre(CommitOutcome::kDeduplicated));
  }
}

// The Abort of a Commit that failed over gRPC comes late: crumbd has freed the room, and another
// Reserve has got it.
TEST_F(StagingTest, AnAbortOfAFailedCommitTakesNoOtherRoom) {
  Start(/*sockets=*/false);
  auto slots = Reserved(1);
  Write(slots[0], 1);
  const uint64_t offset = slots[0].offset();
  crumbd_->block_commit = true;
  crumbd_->block_abort = true;
  EXPECT_FALSE(StartCommit(std::move(slots), milliseconds(1))->Finish().ok());
  crumbd_->block_commit = false;
  ASSERT_TRUE(Eventually([&] { return crumbd_->reservations() == 0; })) << "crumbd served it";
  slots = Reserved(1);
  EXPECT_EQ(slots[0].offset(), offset);
  crumbd_->block_abort = false;
  ASSERT_TRUE(Eventually([&] { return crumbd_->aborts() == 1; }));
  EXPECT_EQ(crumbd_->reservations(), 1u);
}

TEST_F(StagingTest, RoomOfAReserveThatWasGivenUpComesBack) {
  for (const bool sockets : {true, false}) {
    Start(sockets);
    auto slots = Reserved(1);
    Write(slots[0], 1);
    crumbd_->block_commit = true;
    crumbd_->block_reserve = true;
    // crumbd first responds to a Commit that it received earlier over the socket.
    auto pending = StartCommit(std::move(slots), milliseconds(sockets ? 1 : 20'000));
    if (sockets) pending.reset();
    // The deadline is long enough that crumbd has received the call before it is given up.
    const auto late = client_->Reserve(2, 512, milliseconds(300));
    EXPECT_TRUE(absl::IsDeadlineExceeded(late.status()));
    crumbd_->block_reserve = false;
    crumbd_->block_commit = false;
    ASSERT_TRUE(Eventually([&] { return crumbd_->reserves() == 2; }));
    // There is no call behind it that would receive the response.
    EXPECT_TRUE(Eventually([&] { return crumbd_->pages().size() == 1; }));
    EXPECT_TRUE(Eventually([&] { return crumbd_->reservations() == 0; }));
    pending.reset();
    client_.reset();
    crumbd_.reset();
  }
}

TEST_F(StagingTest, RoomOfALostConnectionCannotBeCommitted) {
  Start();
  auto slots = Reserved(1);
  crumbd_->BreakStreams();
  ASSERT_TRUE(Eventually([&] { return crumbd_->sessions() == 2 && client_->connected(); }));
  EXPECT_EQ(StartCommit(std::move(slots))->Finish().status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(StartCommit({})->Finish()->empty());
  crumbd_.reset();
  EXPECT_TRUE(Eventually([&] { return !client_->connected(); }));
  EXPECT_TRUE(absl::IsUnavailable(client_->Reserve(1, 512, seconds(5)).status()));
}

}  // namespace
}  // namespace crumb::client
