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

  std::unique_ptr<PendingCall> Ask(uint64_t number, size_t key_bytes = 64,
                                   Duration timeout = kPatience) {
    v1::SocketCall call;
    call.mutable_acquire()->set_request(number);
    call.mutable_acquire()->set_keys(std::string(key_bytes, 'k'));
    return calls_->Start(call, Clock::Real().Now() + timeout, &answer_);
  }

  v1::SocketCall Question() {
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
  void Answer(uint64_t number, uint64_t lease) {
    v1::SocketAnswer answer;
    answer.set_request(number);
    answer.mutable_acquire()->set_lease(lease);
    Send(answer.SerializeAsString());
  }

  UniqueFd crumbd_;
  std::unique_ptr<CallSocket> calls_;
  v1::SocketAnswer answer_;
};

TEST_F(CallSocketTest, AsksAndIsAnswered) {
  for (const uint64_t number : {5, 6}) {
    const auto call = Ask(number);
    ASSERT_NE(call, nullptr);
    EXPECT_FALSE(call->Ready());
    const v1::SocketCall question = Question();
    EXPECT_EQ(question.acquire().request(), number);
    EXPECT_EQ(question.acquire().keys(), std::string(64, 'k'));
    EXPECT_GT(question.timeout_us(), 0u);
    EXPECT_LE(question.timeout_us(), 20'000'000u);
    Answer(number, 70 + number);
    if (number == 6) {
      EXPECT_TRUE(call->Ready());
    }
    EXPECT_TRUE(call->Finish().ok());
    EXPECT_EQ(answer_.acquire().lease(), 70 + number);
    EXPECT_FALSE(answer_.fragments_apart());
  }
}

TEST_F(CallSocketTest, ErrorsAreCrumbds) {
  const auto call = Ask(1);
  v1::SocketAnswer answer;
  answer.set_request(1);
  answer.set_code(static_cast<uint32_t>(absl::StatusCode::kNotFound));
  answer.set_error("no such keyspace");
  Send(answer.SerializeAsString());
  const absl::Status status = call->Finish();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_EQ(status.message(), "no such keyspace");
}

TEST_F(CallSocketTest, OneQuestionAtATime) {
  auto first = Ask(1);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(Ask(2), nullptr);
  first.reset();  // abandons the request
  const auto third = Ask(3);
  ASSERT_NE(third, nullptr);
  Answer(1, 1);
  EXPECT_FALSE(third->Ready());
  Answer(3, 33);
  EXPECT_TRUE(third->Finish().ok());
  EXPECT_EQ(answer_.acquire().lease(), 33u);
}

TEST_F(CallSocketTest, ADeadlineEndsTheWaitAndALateAnswerIsDropped) {
  EXPECT_TRUE(absl::IsDeadlineExceeded(Ask(1, 64, std::chrono::milliseconds(1))->Finish()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Ask(2, 64, std::chrono::milliseconds(-1))->Finish()));
  Answer(1, 1);
  Answer(2, 2);
  const auto call = Ask(3);
  Answer(3, 33);
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_EQ(answer_.acquire().lease(), 33u);
}

TEST_F(CallSocketTest, WhatIsTooLargeGoesElsewhere) {
  EXPECT_EQ(Ask(1, kCallMessageBytesMax), nullptr);
  const auto largest = Ask(2, kCallMessageBytesMax - 128);
  ASSERT_NE(largest, nullptr);
  EXPECT_EQ(Question().acquire().keys().size(), kCallMessageBytesMax - 128);
}

TEST_F(CallSocketTest, AnAnswerWithoutItsFragmentsSaysSo) {
  const auto call = Ask(1);
  v1::SocketAnswer answer;
  answer.set_request(1);
  answer.set_fragments_apart(true);
  Send(answer.SerializeAsString());
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_TRUE(answer_.fragments_apart());
}

TEST_F(CallSocketTest, WithoutCrumbdItIsOfNoUse) {
  const auto call = Ask(1);
  crumbd_.Reset();
  EXPECT_TRUE(absl::IsUnavailable(call->Finish()));
  EXPECT_EQ(Ask(2), nullptr);
}

TEST_F(CallSocketTest, AfterNonsenseItIsOfNoUse) {
  const auto call = Ask(1);
  Send(std::string(100, '\xff'));
  EXPECT_TRUE(absl::IsUnavailable(call->Finish()));
  EXPECT_EQ(Ask(2), nullptr);
}

TEST_F(CallSocketTest, ASocketThatTakesNoMoreIsNotWaitedFor) {
  int sent = 0;
  while (sent < 1000 && Ask(1, 60'000) != nullptr) ++sent;
  EXPECT_GT(sent, 0);
  EXPECT_LT(sent, 1000);
  for (int i = 0; i < sent; ++i) Question();
  EXPECT_NE(Ask(2), nullptr);
}

TEST_F(CallSocketTest, ReservesAndCommits) {
  v1::SocketCall reserve;
  reserve.mutable_reserve()->set_count(3);
  reserve.mutable_reserve()->set_fragment_bytes(4096);
  auto call = calls_->Start(reserve, Clock::Real().Now() + kPatience, &answer_);
  ASSERT_NE(call, nullptr);
  const v1::SocketCall asked = Question();
  EXPECT_NE(asked.request(), 0u);
  EXPECT_EQ(asked.reserve().SerializeAsString(), reserve.reserve().SerializeAsString());
  v1::SocketAnswer answer;
  answer.set_request(asked.request());
  answer.mutable_reserve()->add_offsets(512);
  Send(answer.SerializeAsString());
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_EQ(answer_.SerializeAsString(), answer.SerializeAsString());

  v1::SocketCall commit;
  commit.mutable_commit()->add_offsets(512);
  commit.mutable_commit()->add_header_offsets(4000);
  call = calls_->Start(commit, Clock::Real().Now() + kPatience, &answer_);
  ASSERT_NE(call, nullptr);
  const v1::SocketCall question = Question();
  EXPECT_GT(question.request(), asked.request());
  EXPECT_EQ(question.commit().SerializeAsString(), commit.commit().SerializeAsString());
  answer.Clear();
  answer.set_request(question.request());
  answer.mutable_commit()->add_outcomes(v1::COMMIT_OUTCOME_STORED);
  answer.mutable_commit()->set_flush_mark(9);
  Send(answer.SerializeAsString());
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_EQ(answer_.SerializeAsString(), answer.SerializeAsString());
}

TEST_F(CallSocketTest, WhatCrumbdRefusesOnASocketGoesElsewhere) {
  const TimePoint deadline = Clock::Real().Now() + kPatience;
  v1::SocketCall empty;
  EXPECT_EQ(calls_->Start(empty, deadline, &answer_), nullptr);
  v1::SocketCall call;
  v1::ReserveRequest& reserve = *call.mutable_reserve();
  reserve.set_count(kCallFragmentsMax + 1);
  EXPECT_EQ(calls_->Start(call, deadline, &answer_), nullptr);
  reserve.set_count(kCallFragmentsMax);
  reserve.set_keys(std::string((kCallFragmentsMax + 1) * 32, 'k'));
  EXPECT_EQ(calls_->Start(call, deadline, &answer_), nullptr);
  reserve.set_keys(std::string(kCallFragmentsMax * 32, 'k'));
  reserve.set_pool(std::string(16, 'p'));
  EXPECT_EQ(calls_->Start(call, deadline, &answer_), nullptr);
  reserve.clear_pool();
  EXPECT_NE(calls_->Start(call, deadline, &answer_), nullptr);
  v1::CommitRequest& commit = *call.mutable_commit();
  for (int i = 0; i <= kCallFragmentsMax; ++i) commit.add_offsets(UINT64_MAX);
  EXPECT_EQ(calls_->Start(call, deadline, &answer_), nullptr);
  commit.mutable_offsets()->RemoveLast();
  commit.set_pool(std::string(16, 'p'));
  EXPECT_EQ(calls_->Start(call, deadline, &answer_), nullptr);
  commit.clear_pool();
  EXPECT_NE(calls_->Start(call, deadline, &answer_), nullptr);
}

TEST_F(CallSocketTest, ThreadsShareItAndEachGetsItsOwnAnswer) {
  Thread answering("crumbd", [this] {
    std::string bytes(kCallMessageBytesMax, '\0');
    v1::SocketCall call;
    for (ssize_t size; (size = ::recv(crumbd_.get(), bytes.data(), bytes.size(), 0)) > 0;) {
      ASSERT_TRUE(call.ParseFromArray(bytes.data(), static_cast<int>(size)));
      Answer(call.acquire().request(), 1000 + call.acquire().request());
    }
  });
  std::atomic<int> asked{0};
  {
    std::vector<Thread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back("asking", [&, thread] {
        for (uint64_t i = 0; i < 200; ++i) {
          const uint64_t number = 4 * i + thread + 1;
          v1::SocketCall question;
          question.mutable_acquire()->set_request(number);
          v1::SocketAnswer answer;
          const auto call = calls_->Start(question, Clock::Real().Now() + kPatience, &answer);
          if (call == nullptr) continue;  // another thread's request is in flight
          ++asked;
          if (i % 8 == 7) continue;  // abandons the request
          EXPECT_TRUE(call->Finish().ok());
          EXPECT_EQ(answer.acquire().lease(), 1000 + number);
        }
      });
    }
    for (Thread& thread : threads) thread.Join();
  }
  EXPECT_GT(asked, 0);
  EXPECT_TRUE(Ask(5000)->Finish().ok());  // behind responses to abandoned requests
  calls_.reset();
  answering.Join();
}

}  // namespace
}  // namespace crumb::client
