// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/call_socket.h"

#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "common/call_message.h"
#include "common/thread.h"
#include "gtest/gtest.h"

namespace crumb::client {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);

// A fixture in which the test plays crumbd on the other end of the socket.
class CallSocketTest : public testing::Test {
 protected:
  CallSocketTest() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    crumbd_ = UniqueFd(ends[0]);
    calls_ = std::make_unique<CallSocket>(UniqueFd(ends[1]));
  }

  std::unique_ptr<PendingCall> Send(uint64_t number, size_t key_bytes = 64,
                                    Duration timeout = kPatience) {
    v1::SocketCall call;
    call.mutable_acquire()->set_request(number);
    call.mutable_acquire()->set_keys(std::string(key_bytes, 'k'));
    return calls_->Start(call, Clock::Real().Now() + timeout, &response_);
  }

  v1::SocketCall ReceiveCall() {
    std::string bytes(kCallMessageBytesMax, '\0');
    const ssize_t size = ::recv(crumbd_.get(), bytes.data(), bytes.size(), 0);
    v1::SocketCall call;
    EXPECT_TRUE(size > 0 && call.ParseFromArray(bytes.data(), static_cast<int>(size)));
    return call;
  }

  void Send(const std::string& bytes) {
    EXPECT_EQ(::send(crumbd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void Respond(uint64_t number, uint64_t lease) {
    v1::SocketResponse response;
    response.set_request(number);
    response.mutable_acquire()->set_lease(lease);
    Send(response.SerializeAsString());
  }

  UniqueFd crumbd_;
  std::unique_ptr<CallSocket> calls_;
  v1::SocketResponse response_;
};

TEST_F(CallSocketTest, SendsCallsAndReceivesResponses) {
  for (const uint64_t number : {5, 6}) {
    const auto call = Send(number);
    ASSERT_NE(call, nullptr);
    EXPECT_FALSE(call->Ready());
    const v1::SocketCall sent_call = ReceiveCall();
    EXPECT_EQ(sent_call.acquire().request(), number);
    EXPECT_EQ(sent_call.acquire().keys(), std::string(64, 'k'));
    EXPECT_GT(sent_call.timeout_us(), 0u);
    EXPECT_LE(sent_call.timeout_us(), 20'000'000u);
    Respond(number, 70 + number);
    if (number == 6) {
      EXPECT_TRUE(call->Ready());
    }
    EXPECT_TRUE(call->Finish().ok());
    EXPECT_EQ(response_.acquire().lease(), 70 + number);
    EXPECT_FALSE(response_.fragments_apart());
  }
}

TEST_F(CallSocketTest, ErrorsAreCrumbds) {
  const auto call = Send(1);
  v1::SocketResponse response;
  response.set_request(1);
  response.set_code(static_cast<uint32_t>(absl::StatusCode::kNotFound));
  response.set_error("no such keyspace");
  Send(response.SerializeAsString());
  const absl::Status status = call->Finish();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_EQ(status.message(), "no such keyspace");
}

TEST_F(CallSocketTest, OneCallAtATime) {
  auto first = Send(1);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(Send(2), nullptr);
  first.reset();  // abandons the request
  const auto third = Send(3);
  ASSERT_NE(third, nullptr);
  Respond(1, 1);
  EXPECT_FALSE(third->Ready());
  Respond(3, 33);
  EXPECT_TRUE(third->Finish().ok());
  EXPECT_EQ(response_.acquire().lease(), 33u);
}

TEST_F(CallSocketTest, ADeadlineEndsTheWaitAndALateResponseIsDropped) {
  EXPECT_TRUE(absl::IsDeadlineExceeded(Send(1, 64, std::chrono::milliseconds(1))->Finish()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Send(2, 64, std::chrono::milliseconds(-1))->Finish()));
  Respond(1, 1);
  Respond(2, 2);
  const auto call = Send(3);
  Respond(3, 33);
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_EQ(response_.acquire().lease(), 33u);
}

TEST_F(CallSocketTest, WhatIsTooLargeGoesElsewhere) {
  EXPECT_EQ(Send(1, kCallMessageBytesMax), nullptr);
  const auto largest = Send(2, kCallMessageBytesMax - 128);
  ASSERT_NE(largest, nullptr);
  EXPECT_EQ(ReceiveCall().acquire().keys().size(), kCallMessageBytesMax - 128);
}

TEST_F(CallSocketTest, AResponseWithoutItsFragmentsSaysSo) {
  const auto call = Send(1);
  v1::SocketResponse response;
  response.set_request(1);
  response.set_fragments_apart(true);
  Send(response.SerializeAsString());
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_TRUE(response_.fragments_apart());
}

TEST_F(CallSocketTest, WithoutCrumbdItIsOfNoUse) {
  const auto call = Send(1);
  crumbd_.Reset();
  EXPECT_TRUE(absl::IsUnavailable(call->Finish()));
  EXPECT_EQ(Send(2), nullptr);
}

TEST_F(CallSocketTest, AfterNonsenseItIsOfNoUse) {
  const auto call = Send(1);
  Send(std::string(100, '\xff'));
  EXPECT_TRUE(absl::IsUnavailable(call->Finish()));
  EXPECT_EQ(Send(2), nullptr);
}

TEST_F(CallSocketTest, ASocketThatTakesNoMoreIsNotWaitedFor) {
  int sent = 0;
  while (sent < 1000 && Send(1, 60'000) != nullptr) ++sent;
  EXPECT_GT(sent, 0);
  EXPECT_LT(sent, 1000);
  for (int i = 0; i < sent; ++i) ReceiveCall();
  EXPECT_NE(Send(2), nullptr);
}

TEST_F(CallSocketTest, ReservesAndCommits) {
  v1::SocketCall reserve;
  reserve.mutable_reserve()->set_count(3);
  reserve.mutable_reserve()->set_fragment_bytes(4096);
  auto call = calls_->Start(reserve, Clock::Real().Now() + kPatience, &response_);
  ASSERT_NE(call, nullptr);
  const v1::SocketCall requested = ReceiveCall();
  EXPECT_NE(requested.request(), 0u);
  EXPECT_EQ(requested.reserve().SerializeAsString(), reserve.reserve().SerializeAsString());
  v1::SocketResponse response;
  response.set_request(requested.request());
  response.mutable_reserve()->add_offsets(512);
  Send(response.SerializeAsString());
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_EQ(response_.SerializeAsString(), response.SerializeAsString());

  v1::SocketCall commit;
  commit.mutable_commit()->add_offsets(512);
  commit.mutable_commit()->add_header_offsets(4000);
  call = calls_->Start(commit, Clock::Real().Now() + kPatience, &response_);
  ASSERT_NE(call, nullptr);
  const v1::SocketCall sent_call = ReceiveCall();
  EXPECT_GT(sent_call.request(), requested.request());
  EXPECT_EQ(sent_call.commit().SerializeAsString(), commit.commit().SerializeAsString());
  response.Clear();
  response.set_request(sent_call.request());
  response.mutable_commit()->add_outcomes(v1::COMMIT_OUTCOME_STORED);
  response.mutable_commit()->set_flush_mark(9);
  Send(response.SerializeAsString());
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_EQ(response_.SerializeAsString(), response.SerializeAsString());
}

TEST_F(CallSocketTest, WhatCrumbdRefusesOnASocketGoesElsewhere) {
  const TimePoint deadline = Clock::Real().Now() + kPatience;
  v1::SocketCall empty;
  EXPECT_EQ(calls_->Start(empty, deadline, &response_), nullptr);
  v1::SocketCall call;
  v1::ReserveRequest& reserve = *call.mutable_reserve();
  reserve.set_count(kCallFragmentsMax + 1);
  EXPECT_EQ(calls_->Start(call, deadline, &response_), nullptr);
  reserve.set_count(kCallFragmentsMax);
  reserve.set_keys(std::string((kCallFragmentsMax + 1) * 32, 'k'));
  EXPECT_EQ(calls_->Start(call, deadline, &response_), nullptr);
  reserve.set_keys(std::string(kCallFragmentsMax * 32, 'k'));
  reserve.set_pool(std::string(16, 'p'));
  EXPECT_EQ(calls_->Start(call, deadline, &response_), nullptr);
  reserve.clear_pool();
  EXPECT_NE(calls_->Start(call, deadline, &response_), nullptr);
  v1::CommitRequest& commit = *call.mutable_commit();
  for (int i = 0; i <= kCallFragmentsMax; ++i) commit.add_offsets(UINT64_MAX);
  EXPECT_EQ(calls_->Start(call, deadline, &response_), nullptr);
  commit.mutable_offsets()->RemoveLast();
  commit.set_pool(std::string(16, 'p'));
  EXPECT_EQ(calls_->Start(call, deadline, &response_), nullptr);
  commit.clear_pool();
  EXPECT_NE(calls_->Start(call, deadline, &response_), nullptr);
}

TEST_F(CallSocketTest, ThreadsShareItAndEachGetsItsOwnResponse) {
  Thread responding("crumbd", [this] {
    std::string bytes(kCallMessageBytesMax, '\0');
    v1::SocketCall call;
    for (ssize_t size; (size = ::recv(crumbd_.get(), bytes.data(), bytes.size(), 0)) > 0;) {
      ASSERT_TRUE(call.ParseFromArray(bytes.data(), static_cast<int>(size)));
      Respond(call.acquire().request(), 1000 + call.acquire().request());
    }
  });
  std::atomic<int> requested{0};
  {
    std::vector<Thread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back("calling", [&, thread] {
        for (uint64_t i = 0; i < 200; ++i) {
          const uint64_t number = 4 * i + thread + 1;
          v1::SocketCall sent_call;
          sent_call.mutable_acquire()->set_request(number);
          v1::SocketResponse response;
          const auto call = calls_->Start(sent_call, Clock::Real().Now() + kPatience, &response);
          if (call == nullptr) continue;  // another thread's request is in flight
          ++requested;
          if (i % 8 == 7) continue;  // abandons the request
          EXPECT_TRUE(call->Finish().ok());
          EXPECT_EQ(response.acquire().lease(), 1000 + number);
        }
      });
    }
    for (Thread& thread : threads) thread.Join();
  }
  EXPECT_GT(requested, 0);
  EXPECT_TRUE(Send(5000)->Finish().ok());  // skips responses to abandoned requests
  calls_.reset();
  responding.Join();
}

}  // namespace
}  // namespace crumb::client
