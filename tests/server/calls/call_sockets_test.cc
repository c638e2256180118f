// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/call_sockets.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "server/calls/lease_calls.h"
#include "tests/common/eventually.h"
#include "tests/server/call_sockets_fixture.h"
#include "tests/server/hostile_descriptors.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

TEST_F(CallSocketsTest, RespondsAsAcquireDoes) {
  Start();
  v1::SocketCall call = Call(3, 2, 10);
  call.mutable_acquire()->set_window_tokens(256);
  Send(call);
  const v1::SocketResponse response = Receive();
  EXPECT_EQ(response.request(), 3u);
  EXPECT_EQ(response.code(), 0u);
  EXPECT_FALSE(response.fragments_apart());
  v1::AcquireResponse expected;
  Completion completion;
  Acquire(context_, OpenSession(), TimePoint::max(), call.acquire(), &expected, completion.done());
  EXPECT_EQ(expected.hit_pages(), 6u);
  EXPECT_NE(response.acquire().lease(), 0u);
  expected.set_lease(response.acquire().lease());
  EXPECT_EQ(response.acquire().SerializeAsString(), expected.SerializeAsString());
  EXPECT_TRUE(sessions_.Release(*session_, response.acquire().lease()));
  const Histogram& timed = metrics_.requests.of(Rpc::kAcquire, Outcome::kOk);
  uint64_t times = 0;
  for (size_t i = 0; i <= timed.bounds().size(); ++i) times += timed.bucket(i);
  EXPECT_EQ(times, 1u);
}

TEST_F(CallSocketsTest, ErrorsAreReturned) {
  Start();
  v1::SocketCall call = Call(4, 0, 1);
  call.mutable_acquire()->set_keyspace(std::string(32, 'x'));
  Send(call);
  const v1::SocketResponse unknown = Receive();
  EXPECT_EQ(unknown.request(), 4u);
  EXPECT_EQ(unknown.code(), static_cast<uint32_t>(absl::StatusCode::kNotFound));
  EXPECT_THAT(unknown.error(), HasSubstr("keyspace"));
  sessions_.Disconnect(session_);
  Send(Call(5, 0, 1));
  EXPECT_EQ(Receive().code(), static_cast<uint32_t>(absl::StatusCode::kUnauthenticated));
}

TEST_F(CallSocketsTest, MoreCallsThanTheBoundAllowsAreRefused) {
  limits_.requests_max = 2;
  Start();
  store_.HoldAcquires();
  for (const uint64_t number : {1, 2, 3}) Send(Call(number, 0, 1));
  const v1::SocketResponse refused = Receive();
  EXPECT_EQ(refused.request(), 3u);
  EXPECT_EQ(refused.code(), static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  store_.RespondHeld();
  EXPECT_EQ(Receive().request() + Receive().request(), 3u);
}

// A message of 60 KB has fields that crumbd does not know, which take 20 times as much memory.
TEST_F(CallSocketsTest, MemoryOfRequestsThatWaitIsBounded) {
  constexpr int kGroups = 30'000, kUnknownField = 15;
  v1::SocketCall call = Call(1, 0, 1);
  for (int i = 0; i < kGroups; ++i) {
    call.GetReflection()->MutableUnknownFields(&call)->AddGroup(kUnknownField);
  }
  limits_.request_bytes_max = ByteSize{call.SpaceUsedLong() * 3 / 2};
  Start();
  store_.HoldAcquires();
  Send(call);
  call.mutable_acquire()->set_request(2);
  Send(call);
  const v1::SocketResponse refused = Receive();
  EXPECT_EQ(refused.request(), 2u);
  EXPECT_EQ(refused.code(), static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(refused.error(), HasSubstr("limits.request_bytes_max"));
  store_.RespondHeld();
  EXPECT_EQ(Receive().request(), 1u);
}

TEST_F(CallSocketsTest, FragmentsThatDoNotFitAreSentToACallerThatNamesTheLease) {
  Start({.response_bytes_max = 64});
  Send(Call(1, 0, 8));
  const v1::SocketResponse response = Receive();
  EXPECT_TRUE(response.fragments_apart());
  EXPECT_EQ(response.acquire().hit_pages(), 8u);
  EXPECT_EQ(response.acquire().page_tiers_size(), 8);
  EXPECT_EQ(response.acquire().fragments().pages_size(), 0);
  const uint64_t lease = response.acquire().lease();
  v1::AcquireRequest request = Call(1, 0, 8).acquire();
  request.set_lease(lease);
  v1::AcquireResponse joined;
  Completion completion;
  Acquire(context_, session_, TimePoint::max(), request, &joined, completion.done());
  EXPECT_TRUE(completion.status.ok());
  EXPECT_EQ(joined.fragments().pages_size(), 8);
  EXPECT_EQ(metrics_.tokens.Total(TokenTier::kHost), 8u * kPageTokens);  // counted once
  EXPECT_TRUE(sessions_.Release(*session_, lease));
  EXPECT_EQ(leases(), 1u);
  EXPECT_TRUE(sessions_.Release(*session_, lease));
  EXPECT_EQ(leases(), 0u);
}

TEST_F(CallSocketsTest, HostileMessagesEndTheirSocketAlone) {
  Start();
  v1::SocketCall unnamed = Call(1, 0, 1);
  unnamed.mutable_acquire()->set_request(0);
  std::mt19937 random(7);
  std::string garbage(1000, '\0');
  for (char& c : garbage) c = static_cast<char>(random());
  const std::vector<std::string> hostile = {garbage, unnamed.SerializeAsString(),
                                            std::string(1, '\0'),
                                            std::string(kCallMessageBytesMax + 1, '\0')};
  for (const std::string& bytes : hostile) {
    const CallPlane::Opened opened = Open(session_);
    Send(opened.socket.get(), bytes);
    EXPECT_TRUE(IsClosed(opened.socket.get())) << bytes.size();
  }
  Send(Call(2, 0, 1));
  EXPECT_EQ(Receive().acquire().hit_pages(), 1u);
}

// Calls carry no descriptors. One that comes all the same is closed on a thread of its sender's.
TEST_F(CallSocketsTest, ADescriptorThatDoesNotCloseDelaysNoOtherCall) {
  Start();
  CallPlane::Opened hostile;
  const auto lingers = SendLingering([&](int fd) {
    hostile = Open(OpenSession());
    ASSERT_TRUE(SendDescriptors(hostile.socket.get(), "no call", {&fd, 1}));
  });
  Send(Call(1, 0, 1));
  EXPECT_EQ(Receive().request(), 1u);
  EXPECT_TRUE(IsClosed(hostile.socket.get()));
}

// A socket is closed with a message that was not received, which has the last reference to a
// descriptor whose close waits.
TEST_F(CallSocketsTest, ADescriptorInAnUnreadMessageDelaysNoOtherCall) {
  Start();
  CallPlane::Opened hostile;
  const auto lingers = SendLingering([&](int fd) {
    do {  // the first message ends the socket, perhaps before the second is sent
      hostile = Open(OpenSession());
      Send(hostile.socket.get(), "no call");
    } while (!SendDescriptors(hostile.socket.get(), "unread", {&fd, 1}));
  });
  Send(Call(1, 0, 1));
  EXPECT_EQ(Receive().request(), 1u);
  EXPECT_TRUE(IsClosed(hostile.socket.get()));
}

TEST_F(CallSocketsTest, WhoNeverReadsIsCutOffAndLeavesNoLease) {
  Start();
  int sent = 0;
  for (; sent < 100'000; ++sent) {
    const std::string next = Call(static_cast<uint64_t>(sent) + 1, 0, 8).SerializeAsString();
    if (::send(opened_.socket.get(), next.data(), next.size(), MSG_NOSIGNAL) < 0) break;
  }
  EXPECT_LT(sent, 100'000);
  // Leases whose responses lie in the socket are the session's; those of responses that did not fit
  // have ended.
  sessions_.End(session_);
  EXPECT_TRUE(Eventually([&] { return leases() == 0; }));
}

TEST_F(CallSocketsTest, CallsInProgressOutliveTheirSocketAndAreWaitedFor) {
  Start();
  store_.HoldAcquires();
  Send(Call(1, 0, 8));
  ASSERT_TRUE(Eventually([&] { return metrics_.requests.in_flight() == 1; }));
  calls_->Close(opened_.number);
  EXPECT_TRUE(IsClosed(opened_.socket.get()));
  const CallPlane::Opened other = Open(session_);
  std::atomic<bool> stopped{false};
  Thread stopper("stopper", [&] {
    calls_->Stop();
    stopped = true;
  });
  EXPECT_TRUE(Eventually([&] { return !calls_->Open(session_, closing_, "user").ok(); }));
  EXPECT_FALSE(stopped);
  store_.RespondHeld();
  stopper.Join();
  EXPECT_TRUE(IsClosed(other.socket.get()));
  EXPECT_EQ(leases(), 0u);  // the response could not be sent
}

TEST_F(CallSocketsTest, SocketsComeAndGoDuringCallsOfOthers) {
  Start();
  const std::shared_ptr<Session> other = OpenSession();
  std::atomic<bool> done{false};
  Thread closing("closing", [&] {
    for (uint64_t number = 1; !done; ++number) {
      const CallPlane::Opened opened = Open(other);
      Send(opened.socket.get(), Call(number, 0, 8).SerializeAsString());
      calls_->Close(opened.number);
    }
  });
  for (uint64_t number = 1; number <= 300 && !HasFailure(); ++number) {
    Send(Call(number, 0, 8));
    const v1::SocketResponse response = Receive();
    EXPECT_EQ(response.request(), number);
    EXPECT_EQ(response.acquire().hit_pages(), 8u);
    EXPECT_TRUE(sessions_.Release(*session_, response.acquire().lease()));
  }
  done = true;
  closing.Join();
  calls_->Stop();
  sessions_.End(other);  // it holds leases whose responses it did not read
  EXPECT_EQ(leases(), 0u);
}

TEST_F(CallSocketsTest, LeavesNoDescriptorBehind) {
  Start();
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 10; ++i) {
    CallPlane::Opened opened = Open(session_);
    if (i % 2 == 0) calls_->Close(opened.number);
  }
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == before; }));
}

}  // namespace
}  // namespace crumb::server
