// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Reserve and Commit over sessions' sockets for calls.
#include <atomic>
#include <cstring>
#include <future>
#include <string>
#include <vector>

#include "common/mapping.h"
#include "gmock/gmock.h"
#include "server/calls/call_sockets.h"
#include "tests/common/eventually.h"
#include "tests/server/call_sockets_fixture.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class StagingSocketsTest : public CallSocketsTest {
 protected:
  static v1::SocketCall ReserveCall(uint64_t number, uint32_t count, uint64_t bytes) {
    v1::SocketCall call;
    call.set_request(number);
    call.mutable_reserve()->set_count(count);
    call.mutable_reserve()->set_fragment_bytes(bytes);
    return call;
  }
  v1::SocketCall CommitCall(uint64_t number, const std::vector<uint64_t>& offsets) const {
    v1::SocketCall call;
    call.set_request(number);
    call.mutable_commit()->set_keyspace(std::string(keyspace_->id.view()));
    for (const uint64_t offset : offsets) {
      call.mutable_commit()->add_offsets(offset);
      call.mutable_commit()->add_header_offsets(tiles_bytes());
    }
    return call;
  }
  // Returns offsets of room for `count` fragments.
  std::vector<uint64_t> Reserved(uint64_t number, uint32_t count) {
    Send(ReserveCall(number, count, fragment_bytes()));
    const v1::SocketResponse response = Receive();
    EXPECT_EQ(response.request(), number);
    EXPECT_EQ(response.code(), 0u) << response.error();
    const auto& offsets = response.reserve().offsets();
    return {offsets.begin(), offsets.end()};
  }
  void Write(uint64_t offset, const std::vector<std::byte>& fragment) const {
    const Mapping mine = Mapping::Of(session_->staging()->fd(), session_->staging()->size(),
                                     Mapping::Access::kReadWrite)
                             .value();
    std::memcpy(mine.data() + offset, fragment.data(), fragment.size());
  }
  bool IsThere(int number) {
    return store_.Lookup({keyspace_->id, keyspace_->generation.load(), {Key(number)}, {}, {}})
               .hit_pages == 1;
  }
  size_t reservations() const { return session_->staging()->reservations(); }
  uint64_t Times(Rpc rpc, Outcome outcome) const {
    const Histogram& timed = metrics_.requests.of(rpc, outcome);
    uint64_t times = 0;
    for (size_t i = 0; i <= timed.bounds().size(); ++i) times += timed.bucket(i);
    return times;
  }

  // Occupies the only commit thread until `let_go_` is set.
  void HoldCommitThread() {
    std::promise<void> held;
    ASSERT_TRUE(commits_.Submit([this, &held] {
      held.set_value();
      let_go_.get_future().wait();
    }));
    held.get_future().wait();
  }
  std::promise<void> let_go_;
};

TEST_F(StagingSocketsTest, ReservedRoomIsCommittedOnce) {
  for (const bool copies : {false, true}) {
    Start({.copies = copies});
    const int page = copies ? 101 : 100;
    const std::vector<uint64_t> offsets = Reserved(1, 2);
    ASSERT_EQ(offsets.size(), 2u);
    EXPECT_EQ(reservations(), 2u);
    Write(offsets[0], Fragment(Key(page)));
    std::vector<std::byte> damaged = Fragment(Key(200));
    damaged[5] ^= std::byte{1};
    Write(offsets[1], damaged);
    Send(CommitCall(2, offsets));
    const v1::SocketResponse response = Receive();
    EXPECT_EQ(response.request(), 2u);
    EXPECT_EQ(response.code(), 0u);
    EXPECT_THAT(response.commit().outcomes(),
                ElementsAre(v1::COMMIT_OUTCOME_STORED, v1::COMMIT_OUTCOME_REFUSED));
    EXPECT_THAT(response.commit().first_error(), HasSubstr("checksum"));
    EXPECT_TRUE(IsThere(page));
    EXPECT_FALSE(IsThere(200));
    EXPECT_EQ(reservations(), 0u);
    Send(CommitCall(3, offsets));
    EXPECT_EQ(Receive().code(), static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_EQ(Times(Rpc::kReserve, Outcome::kOk), 2u);
  EXPECT_EQ(Times(Rpc::kCommit, Outcome::kOk), 2u);
}

TEST_F(StagingSocketsTest, ReservedPagesAreAnnouncedToTheStore) {
  Start();
  v1::SocketCall call = ReserveCall(1, 1, fragment_bytes());
  call.mutable_reserve()->set_keyspace(std::string(keyspace_->id.view()));
  call.mutable_reserve()->set_keys(Keys(50, 1));
  Send(call);
  EXPECT_EQ(Receive().reserve().offsets_size(), 1);
  EXPECT_THAT(store_.pending(), ElementsAre(Key(50)));
}

// A small Commit needs no commit thread; one beyond a step does, and so does any on a socket that
// carries Acquires.
TEST_F(StagingSocketsTest, OnlySmallCommitsAreCopiedByTheSocketsThread) {
  Start({.copies = true});
  HoldCommitThread();
  const std::vector<uint64_t> small = Reserved(1, 1);
  Write(small[0], Fragment(Key(100)));
  Send(CommitCall(2, small));
  EXPECT_THAT(Receive().commit().outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));

  session_ = OpenSession(4 << 20);
  opened_ = Open(session_);
  Send(ReserveCall(3, 1, (2 << 20) + 1));
  const uint64_t large = Receive().reserve().offsets(0);
  Send(CommitCall(4, {large}));
  const auto other = CallSockets::Start(context_, {}).value();
  const std::vector<uint64_t> elsewhere = Reserved(5, 1);
  CallPlane::Opened acquires = other->Open(session_, closing_, "user").value();
  Send(acquires.socket.get(), CommitCall(6, elsewhere).SerializeAsString());
  EXPECT_TRUE(Eventually([&] { return commits_.queued() == 2; }));
  let_go_.set_value();
  EXPECT_EQ(Receive().request(), 4u);
  opened_ = std::move(acquires);
  EXPECT_EQ(Receive().request(), 6u);
  EXPECT_EQ(reservations(), 0u);
  other->Stop();
}

TEST_F(StagingSocketsTest, BoundsAreThoseOfTheCallsOverGrpc) {
  limits_.fragment_bytes_max.value = fragment_bytes();
  limits_.commit_fragments_max = 4;
  Start();
  const auto refused = [&](v1::SocketCall call) {
    Send(call);
    const v1::SocketResponse response = Receive();
    EXPECT_EQ(response.request(), call.request());
    EXPECT_FALSE(response.has_reserve() || response.has_commit());
    EXPECT_EQ(response.code(), static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
    return response.error();
  };
  EXPECT_THAT(refused(ReserveCall(1, 1, fragment_bytes() + 1)),
              HasSubstr("limits.fragment_bytes_max"));
  EXPECT_THAT(refused(ReserveCall(2, 5, 512)), HasSubstr("limits.commit_fragments_max"));
  EXPECT_THAT(refused(CommitCall(3, {0, 1, 2, 3, 4})), HasSubstr("offsets"));
  EXPECT_THAT(refused(CommitCall(4, {0})), HasSubstr("not reserved"));
  v1::SocketCall uneven = CommitCall(5, Reserved(6, 1));
  uneven.mutable_commit()->clear_header_offsets();
  EXPECT_THAT(refused(uneven), HasSubstr("header_offsets"));
  v1::SocketCall keyspace = ReserveCall(7, 1, 512);
  keyspace.mutable_reserve()->set_keyspace(std::string(33, 'k'));
  EXPECT_THAT(refused(keyspace), HasSubstr("keyspace"));
  EXPECT_EQ(reservations(), 0u);

  limits_.commit_fragments_max = 65'536;
  limits_.acquire_keys_max = 65'536;
  EXPECT_THAT(refused(ReserveCall(8, kCallFragmentsMax + 1, 512)), HasSubstr("gRPC"));
  EXPECT_THAT(refused(CommitCall(9, std::vector<uint64_t>(kCallFragmentsMax + 1))),
              HasSubstr("gRPC"));
  v1::SocketCall keys = ReserveCall(10, 1, 512);
  keys.mutable_reserve()->set_keyspace(std::string(keyspace_->id.view()));
  keys.mutable_reserve()->set_keys(Keys(0, kCallFragmentsMax + 1));
  EXPECT_THAT(refused(keys), HasSubstr("gRPC"));
  v1::SocketCall pool = ReserveCall(11, 1, 512);
  pool.mutable_reserve()->set_pool(std::string(16, 'p'));
  EXPECT_THAT(refused(pool), HasSubstr("gRPC"));
  pool = CommitCall(12, {});
  pool.mutable_commit()->set_pool(std::string(16, 'p'));
  EXPECT_THAT(refused(pool), HasSubstr("gRPC"));
}

TEST_F(StagingSocketsTest, AFullCommitQueueRefusesAndFreesTheRoom) {
  commits_.Stop();  // it refuses later tasks
  Start();
  const std::vector<uint64_t> offsets = Reserved(1, 1);
  Send(CommitCall(2, offsets));
  const v1::SocketResponse response = Receive();
  EXPECT_EQ(response.code(), static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(response.error(), HasSubstr("limits.commit_queue"));
  EXPECT_EQ(reservations(), 0u);
  EXPECT_EQ(metrics_.rejected[static_cast<size_t>(Rejection::kCommitQueue)].value(), 1u);
}

TEST_F(StagingSocketsTest, CallsTakePlacesAmongThoseInProgress) {
  limits_.requests_max = 1;
  Start();
  HoldCommitThread();
  const std::vector<uint64_t> offsets = Reserved(1, 2);
  Send(CommitCall(2, {offsets[0]}));
  ASSERT_TRUE(Eventually([&] { return commits_.queued() == 1; }));
  Send(CommitCall(3, {offsets[1]}));
  const v1::SocketResponse refused = Receive();
  EXPECT_EQ(refused.request(), 3u);
  EXPECT_EQ(refused.code(), static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(refused.error(), HasSubstr("limits.requests_max"));
  let_go_.set_value();
  EXPECT_EQ(Receive().request(), 2u);
}

TEST_F(StagingSocketsTest, HostileMessagesEndTheirSocketAlone) {
  Start({.copies = true});
  v1::SocketCall empty;
  empty.set_request(1);
  const std::string whole = ReserveCall(2, 1, 512).SerializeAsString();
  const std::vector<std::string> hostile = {
      empty.SerializeAsString(), ReserveCall(0, 1, 512).SerializeAsString(),
      CommitCall(0, {0}).SerializeAsString(), whole.substr(0, whole.size() - 1)};
  for (const std::string& bytes : hostile) {
    const CallPlane::Opened opened = Open(session_);
    Send(opened.socket.get(), bytes);
    EXPECT_TRUE(IsClosed(opened.socket.get())) << bytes.size();
  }
  EXPECT_EQ(reservations(), 0u);
  EXPECT_EQ(Reserved(3, 1).size(), 1u);
}

// Responses that do not fit the socket were never received: their room is free again. The room of
// those that lie in the socket is the session's until it ends.
TEST_F(StagingSocketsTest, WhoNeverReadsIsCutOffAndKeepsABoundedRoom) {
  Start();
  session_ = OpenSession(64 << 20);
  opened_ = Open(session_);
  int sent = 0;
  for (; sent < 100'000; ++sent) {
    const std::string next =
        ReserveCall(static_cast<uint64_t>(sent) + 1, 1, 512).SerializeAsString();
    if (::send(opened_.socket.get(), next.data(), next.size(), MSG_NOSIGNAL) < 0) break;
  }
  EXPECT_LT(sent, 100'000);
  EXPECT_TRUE(Eventually([&] { return metrics_.requests.in_flight() == 0; }));
  size_t received = 0;
  for (std::string bytes; Receive(opened_.socket.get(), &bytes) > 0; ++received) {
  }
  EXPECT_TRUE(Eventually([&] { return reservations() == received; }));
  sessions_.End(session_);
  EXPECT_EQ(session_->staging(), nullptr);
}

// A process that floods a socket with Commits, and reads nothing, delays no other session's.
TEST_F(StagingSocketsTest, AFloodOfCommitsHoldsUpNoOtherSession) {
  Start({.copies = true});
  const std::shared_ptr<Session> hostile = OpenSession();
  std::atomic<bool> done{false};
  Thread flood("flood", [&] {
    const std::string junk =
        CommitCall(1, std::vector<uint64_t>(kCallFragmentsMax, 512)).SerializeAsString();
    while (!done) {  // each socket ends when its responses do not fit any more
      const CallPlane::Opened flooded = Open(hostile);
      while (!done && ::send(flooded.socket.get(), junk.data(), junk.size(), MSG_NOSIGNAL) > 0) {
      }
      calls_->Close(flooded.number);
    }
  });
  for (int page = 100; page < 120; ++page) {
    const std::vector<uint64_t> offsets = Reserved(static_cast<uint64_t>(2 * page), 1);
    ASSERT_EQ(offsets.size(), 1u);
    Write(offsets[0], Fragment(Key(page)));
    Send(CommitCall(static_cast<uint64_t>(2 * page) + 1, offsets));
    EXPECT_THAT(Receive().commit().outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));
  }
  done = true;
  flood.Join();
}

TEST_F(StagingSocketsTest, AnEndedSessionReservesAndCommitsNothing) {
  Start();
  const std::vector<uint64_t> offsets = Reserved(1, 1);
  Write(offsets[0], Fragment(Key(100)));
  sessions_.End(session_);  // the process was killed between Reserve and Commit
  EXPECT_EQ(session_->staging(), nullptr);
  Send(CommitCall(2, offsets));
  EXPECT_EQ(Receive().code(), static_cast<uint32_t>(absl::StatusCode::kUnauthenticated));
  Send(ReserveCall(3, 1, 512));
  EXPECT_EQ(Receive().code(), static_cast<uint32_t>(absl::StatusCode::kUnauthenticated));
  EXPECT_FALSE(IsThere(100));
  // Sessions without staging memory have none to reserve.
  session_ = OpenSession(0);
  opened_ = Open(session_);
  Send(ReserveCall(4, 1, 512));
  EXPECT_EQ(Receive().code(), static_cast<uint32_t>(absl::StatusCode::kFailedPrecondition));
}

TEST_F(StagingSocketsTest, ACommitInProgressOutlivesItsSocketAndIsWaitedFor) {
  Start();
  HoldCommitThread();
  const std::vector<uint64_t> offsets = Reserved(1, 1);
  Write(offsets[0], Fragment(Key(100)));
  Send(CommitCall(2, offsets));
  ASSERT_TRUE(Eventually([&] { return commits_.queued() == 1; }));
  calls_->Close(opened_.number);
  EXPECT_TRUE(IsClosed(opened_.socket.get()));
  std::atomic<bool> stopped{false};
  Thread stopper("stopper", [&] {
    calls_->Stop();
    stopped = true;
  });
  EXPECT_TRUE(Eventually([&] { return !calls_->Open(session_, closing_, "user").ok(); }));
  EXPECT_FALSE(stopped);
  let_go_.set_value();
  stopper.Join();
  EXPECT_TRUE(IsThere(100));
  EXPECT_EQ(reservations(), 0u);
}

}  // namespace
}  // namespace crumb::server
