// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/staging_calls.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>

#include "common/crc32c.h"
#include "gmock/gmock.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class StagingCallsTest : public CallFixture {
 protected:
  StagingCallsTest()
      : session_(OpenSession()),
        writable_(Mapping::Of(session_->staging()->fd(), session_->staging()->size(),
                              Mapping::Access::kReadWrite)
                      .value()) {}

  uint64_t ReserveOne() {
    v1::ReserveRequest request;
    request.set_count(1);
    request.set_fragment_bytes(fragment_bytes());
    v1::ReserveResponse response;
    EXPECT_TRUE(Reserve(context_, *session_, request, &response).ok());
    EXPECT_EQ(response.offsets_size(), 1);
    return response.offsets(0);
  }

  v1::CommitRequest Request(const std::vector<uint64_t>& offsets) const {
    v1::CommitRequest request;
    request.set_keyspace(std::string(keyspace_->id.view()));
    for (const uint64_t offset : offsets) {
      request.add_offsets(offset);
      request.add_header_offsets(tiles_bytes());
    }
    return request;
  }

  absl::Status Run(const v1::CommitRequest& request, v1::CommitResponse* response) {
    std::promise<absl::Status> promise;
    Commit(context_, *session_, request, response,
           [&](absl::Status status) { promise.set_value(std::move(status)); });
    return promise.get_future().get();
  }

  // Writes `fragment` to a new reservation and commits it.
  v1::CommitResponse CommitBytes(const std::vector<std::byte>& fragment) {
    const uint64_t offset = ReserveOne();
    std::copy(fragment.begin(), fragment.end(), writable_.data() + offset);
    v1::CommitResponse response;
    EXPECT_TRUE(Run(Request({offset}), &response).ok());
    return response;
  }

  bool IsThere(const PageKey& key) {
    return store_.Lookup({keyspace_->id, keyspace_->generation.load(), {key}, {}, {}}).hit_pages ==
           1;
  }

  std::shared_ptr<Session> session_;
  Mapping writable_;
};

TEST_F(StagingCallsTest, CommitMakesAPageVisibleOnce) {
  EXPECT_THAT(CommitBytes(Fragment(Key(1))).outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));
  EXPECT_TRUE(IsThere(Key(1)));
  EXPECT_THAT(CommitBytes(Fragment(Key(1))).outcomes(),
              ElementsAre(v1::COMMIT_OUTCOME_DEDUPLICATED));
  EXPECT_EQ(session_->staging()->reservations(), 0u);
  EXPECT_EQ(metrics_.shm_bytes_in.value(), 2u * tiles_bytes());
}

TEST_F(StagingCallsTest, WhatIsWrongIsRefusedAndFreesTheRoom) {
  const auto refused = [&](const std::vector<std::byte>& fragment) {
    const v1::CommitResponse response = CommitBytes(fragment);
    EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_REFUSED));
    EXPECT_EQ(session_->staging()->reservations(), 0u);
    EXPECT_FALSE(IsThere(Key(2)));
    return response.first_error();
  };
  std::vector<std::byte> flipped = Fragment(Key(2));
  flipped[100] ^= std::byte{4};
  EXPECT_THAT(refused(flipped), HasSubstr("DATA_LOSS"));
  std::vector<std::byte> header_flipped = Fragment(Key(2));
  header_flipped[tiles_bytes() + 40] ^= std::byte{1};
  EXPECT_THAT(refused(header_flipped), HasSubstr("DATA_LOSS"));
  EXPECT_THAT(refused(std::vector<std::byte>(fragment_bytes())), HasSubstr("DATA_LOSS"));
  EXPECT_EQ(metrics_.refused_pages[static_cast<size_t>(Refusal::kChecksum)].value(), 3u);
}

TEST_F(StagingCallsTest, AHeaderOfAnotherKeyspaceGenerationOrShapeIsRefused) {
  const auto refused = [&](const std::function<void(FragmentHeader&)>& change) {
    std::vector<std::byte> fragment = Fragment(Key(3));
    FragmentHeader header = *DecodeFragmentHeader(std::span(fragment).subspan(tiles_bytes()));
    change(header);
    header.tile_sums.resize(static_cast<size_t>(header.range.tiles()));
    fragment.resize(
        std::max(fragment.size(), tiles_bytes() + FragmentHeaderBytes(header.range.tiles())));
    EncodeFragmentHeader(header, std::span(fragment).subspan(
                                     tiles_bytes(), FragmentHeaderBytes(header.range.tiles())));
    fragment.resize(fragment_bytes());
    const v1::CommitResponse response = CommitBytes(fragment);
    EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_REFUSED));
    EXPECT_FALSE(IsThere(Key(3)));
    return response.first_error();
  };
  EXPECT_THAT(refused([](FragmentHeader& header) { header.keyspace.bytes[0] ^= 1; }),
              HasSubstr("the header names keyspace"));
  EXPECT_THAT(refused([](FragmentHeader& header) { header.generation = 9; }),
              HasSubstr("generation is 9"));
  EXPECT_THAT(refused([](FragmentHeader& header) { header.tile_bytes += 128; }),
              HasSubstr("tiles have"));
  EXPECT_THAT(refused([](FragmentHeader& header) { header.format = PageFormat::kBf16; }),
              HasSubstr("tiles have"));
  EXPECT_THAT(refused([](FragmentHeader& header) {
                header.range.layers = {1, 3};
              }),
              HasSubstr("layers or heads"));
  EXPECT_THAT(refused([](FragmentHeader& header) {
                header.range.heads = {2, 4};
              }),
              HasSubstr("layers or heads"));
}

TEST_F(StagingCallsTest, HeaderOffsetsOutOfTheReservationAreRefused) {
  for (const uint32_t bad : {static_cast<uint32_t>(fragment_bytes()), UINT32_MAX,
                             static_cast<uint32_t>(fragment_bytes()) - 1}) {
    v1::CommitRequest request = Request({ReserveOne()});
    request.set_header_offsets(0, bad);
    v1::CommitResponse response;
    ASSERT_TRUE(Run(request, &response).ok());
    EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_REFUSED)) << bad;
  }
  EXPECT_EQ(session_->staging()->reservations(), 0u);
}

TEST_F(StagingCallsTest, ReserveAnnouncesPagesToTheStore) {
  v1::ReserveRequest request;
  request.set_count(1);
  request.set_fragment_bytes(fragment_bytes());
  request.set_keyspace(std::string(keyspace_->id.view()));
  request.set_keys(std::string(64, 'k'));
  v1::ReserveResponse response;
  ASSERT_TRUE(Reserve(context_, *session_, request, &response).ok());
  const PageKey key = PageKey::FromBytes(std::string(32, 'k')).value();
  EXPECT_THAT(store_.pending(), ElementsAre(key, key));
  request.set_keys("half a key");
  EXPECT_EQ(Reserve(context_, *session_, request, &response).code(),
            absl::StatusCode::kInvalidArgument);
  request.set_keys(std::string(32, 'k'));
  request.set_keyspace(std::string(32, 'u'));
  EXPECT_EQ(Reserve(context_, *session_, request, &response).code(), absl::StatusCode::kNotFound);
}

TEST_F(StagingCallsTest, CallsThatAreWrongFreeWhatTheyName) {
  v1::CommitResponse response;
  const uint64_t first = ReserveOne();
  EXPECT_EQ(Run(Request({first, 12'345}), &response).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(session_->staging()->reservations(), 0u);
  const uint64_t again = ReserveOne();
  EXPECT_EQ(Run(Request({again, again}), &response).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(session_->staging()->reservations(), 0u);
  v1::CommitRequest uneven = Request({ReserveOne()});
  uneven.clear_header_offsets();
  EXPECT_EQ(Run(uneven, &response).code(), absl::StatusCode::kInvalidArgument);
  v1::CommitRequest unknown = Request({ReserveOne()});
  unknown.set_keyspace(std::string(32, 'u'));
  EXPECT_EQ(Run(unknown, &response).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Run(Request({}), &response).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(session_->staging()->reservations(), 0u);
  EXPECT_EQ(session_->staging()->free_bytes(), session_->staging()->size());
}

TEST_F(StagingCallsTest, AFullStoreSaysNoRoom) {
  for (int i = 0; i < 256; ++i) Store(Key(1000 + i));
  const v1::CommitResponse response = CommitBytes(Fragment(Key(4)));
  EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_NO_ROOM));
}

TEST_F(StagingCallsTest, ReserveGivesWhatFits) {
  v1::ReserveRequest request;
  request.set_count(4000);
  request.set_fragment_bytes(fragment_bytes());
  v1::ReserveResponse response;
  ASSERT_TRUE(Reserve(context_, *session_, request, &response).ok());
  const size_t room = (fragment_bytes() + 511) / 512 * 512;
  EXPECT_EQ(static_cast<size_t>(response.offsets_size()), (1 << 20) / room);
  v1::AbortRequest abort;
  *abort.mutable_offsets() = response.offsets();
  EXPECT_TRUE(Abort(context_, *session_, abort).ok());
  EXPECT_EQ(session_->staging()->free_bytes(), session_->staging()->size());
  EXPECT_EQ(Abort(context_, *session_, abort).code(), absl::StatusCode::kInvalidArgument);
}

// The caller of a Commit that failed gives its room back, after another Reserve has got it.
TEST_F(StagingCallsTest, ALateAbortOrCommitDoesNotTakeAnotherReservesRoom) {
  v1::ReserveRequest reserve;
  reserve.set_count(1);
  reserve.set_fragment_bytes(fragment_bytes());
  std::vector<v1::CommitRequest> commits;
  for (const uint64_t number : {1, 2}) {
    reserve.set_request(number);
    v1::ReserveResponse response;
    ASSERT_TRUE(Reserve(context_, *session_, reserve, &response).ok());
    commits.push_back(Request({response.offsets(0)}));
    commits.back().add_reserves(number);
    if (number == 1) session_->staging()->Abort(response.offsets(0));
  }
  ASSERT_EQ(commits[0].offsets(0), commits[1].offsets(0));
  const std::vector<std::byte> fragment = Fragment(Key(1));
  std::copy(fragment.begin(), fragment.end(), writable_.data() + commits[1].offsets(0));
  v1::AbortRequest late;
  *late.mutable_offsets() = commits[0].offsets();
  *late.mutable_reserves() = commits[0].reserves();
  EXPECT_EQ(Abort(context_, *session_, late).code(), absl::StatusCode::kInvalidArgument);
  v1::CommitResponse response;
  EXPECT_EQ(Run(commits[0], &response).code(), absl::StatusCode::kInvalidArgument);
  v1::CommitRequest uneven = commits[1];
  uneven.add_reserves(2);
  EXPECT_EQ(Run(uneven, &response).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(session_->staging()->reservations(), 1u);
  ASSERT_TRUE(Run(commits[1], &response).ok());
  EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));
}

TEST_F(StagingCallsTest, AReserveThatItsCallerGaveUpKeepsNoRoom) {
  v1::ReserveRequest reserve;
  reserve.set_count(3);
  reserve.set_fragment_bytes(fragment_bytes());
  reserve.set_request(5);
  v1::ReserveResponse response;
  ASSERT_TRUE(Reserve(context_, *session_, reserve, &response).ok());
  v1::AbortRequest abort;
  abort.add_requests(5);
  abort.add_requests(6);  // crumbd has not got it yet
  EXPECT_TRUE(Abort(context_, *session_, abort).ok());
  EXPECT_EQ(session_->staging()->reservations(), 0u);
  reserve.set_request(6);
  response.Clear();
  EXPECT_TRUE(Reserve(context_, *session_, reserve, &response).ok());
  EXPECT_EQ(response.offsets_size(), 0);
  EXPECT_EQ(session_->staging()->reservations(), 0u);
}

TEST_F(StagingCallsTest, BoundsOfReserve) {
  v1::ReserveResponse response;
  for (const auto& [count, bytes] : {std::pair<uint32_t, uint64_t>{0, 512},
                                     {4097, 512},
                                     {1, 0},
                                     {1, (uint64_t{64} << 20) + 1},
                                     {1, UINT64_MAX}}) {
    v1::ReserveRequest request;
    request.set_count(count);
    request.set_fragment_bytes(bytes);
    EXPECT_EQ(Reserve(context_, *session_, request, &response).code(),
              absl::StatusCode::kInvalidArgument)
        << count << " " << bytes;
  }
  const auto bare = OpenSession(0);
  v1::ReserveRequest request;
  request.set_count(1);
  request.set_fragment_bytes(512);
  EXPECT_EQ(Reserve(context_, *bare, request, &response).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(StagingCallsTest, WritersAreNotifiedOnceTheirPagesAreDurable) {
  int woken = 0;
  const auto notices = std::make_shared<NoticeQueue>(16, [&woken] { ++woken; });
  ASSERT_TRUE(session_->OpenNotices(notices));
  CommitBytes(Fragment(Key(5)));
  CommitBytes(Fragment(Key(6)));
  EXPECT_FALSE(notices->Take().has_value());
  store_.Flush({}, std::nullopt, [](const FlushReport&) {});
  const auto notice = notices->Take();
  ASSERT_TRUE(notice.has_value());
  const auto& durable = std::get<NoticeQueue::Durable>(*notice);
  EXPECT_EQ(durable.keyspace, keyspace_->id);
  EXPECT_THAT(durable.keys, ElementsAre(Key(5), Key(6)));
  EXPECT_EQ(woken, 2);
  EXPECT_FALSE(notices->Take().has_value());
}

TEST_F(StagingCallsTest, WritersOfADuplicateAreNotifiedToo) {
  const auto notices = std::make_shared<NoticeQueue>(16, [] {});
  ASSERT_TRUE(session_->OpenNotices(notices));
  CommitBytes(Fragment(Key(5)));
  const auto other = OpenSession();
  const auto others = std::make_shared<NoticeQueue>(16, [] {});
  std::string why;
  const auto commit_again = [&] {
    return CommitFragment(context_, *keyspace_, Fragment(Key(5)), tiles_bytes(), others, &why);
  };
  EXPECT_EQ(commit_again(), v1::COMMIT_OUTCOME_DEDUPLICATED);
  EXPECT_FALSE(others->Take().has_value());
  store_.Flush({}, std::nullopt, [](const FlushReport&) {});
  EXPECT_TRUE(notices->Take().has_value()) << "the writer of the first copy";
  EXPECT_TRUE(others->Take().has_value()) << "the writer of the duplicate";
  EXPECT_EQ(commit_again(), v1::COMMIT_OUTCOME_DEDUPLICATED);
  EXPECT_TRUE(others->Take().has_value()) << "the page is durable already";
}

// A process that changes its header while crumbd checks it commits the checked header or nothing.
TEST_F(StagingCallsTest, TheHeaderIsTakenOnce) {
  // On one core the header is the wrong one for whole time slices, so trials are not counted.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  constexpr int kStoredMax = 200;  // the store has 256 slots
  const uint64_t offset = ReserveOne();
  std::vector<std::byte> right = Fragment(Key(7));
  FragmentHeader header = *DecodeFragmentHeader(std::span(right).subspan(tiles_bytes()));
  header.range.layers = {1, 3};  // the number of tiles fits, but one layer is not the keyspace's
  std::vector<std::byte> wrong(FragmentHeaderBytes(header.range.tiles()));
  EncodeFragmentHeader(header, wrong);
  const std::vector<std::byte> good(right.begin() + tiles_bytes(), right.end());
  ASSERT_EQ(good.size(), wrong.size());
  std::copy(right.begin(), right.end(), writable_.data() + offset);
  const pid_t flipper = ::fork();  // another process, as a worker is
  if (flipper == 0) {
    while (true) {
      std::memcpy(writable_.data() + offset + tiles_bytes(), wrong.data(), wrong.size());
      std::memcpy(writable_.data() + offset + tiles_bytes(), good.data(), good.size());
    }
  }
  ASSERT_GT(flipper, 0);
  int stored = 0;
  int foreign = 0;
  const std::span<const std::byte> staged(writable_.data() + offset, fragment_bytes());
  while (stored < kStoredMax && std::chrono::steady_clock::now() < deadline) {
    std::string why;
    const auto outcome = CommitFragment(context_, *keyspace_, staged, tiles_bytes(), nullptr, &why);
    if (outcome != v1::COMMIT_OUTCOME_STORED) continue;
    ++stored;
    store_.Acquire({keyspace_->id, keyspace_->generation.load(), {Key(7)}, {}, {}},
                   [&](const absl::StatusOr<storage::AcquireResult>& found) {
                     ASSERT_EQ(found->fragments.size(), 1u);
                     const auto kept = DecodeFragmentHeader(
                         store_.Bytes(found->fragments[0]).subspan(tiles_bytes()));
                     if (!kept.ok() || kept->range != kGeometry.all_tiles()) ++foreign;
                   });
    ASSERT_TRUE(store_.Delete(keyspace_->id, std::vector{Key(7)}).ok());
  }
  ::kill(flipper, SIGKILL);
  ::waitpid(flipper, nullptr, 0);
  EXPECT_EQ(stored, kStoredMax);
  EXPECT_EQ(foreign, 0) << "of " << stored;
}

// One commit thread, held up until a large Commit of one tenant and a small one of another wait.
TEST_F(StagingCallsTest, ASmallCommitDoesNotWaitForAllOfAnotherTenantsLargeOne) {
  constexpr int kMany = 130;  // more than two steps
  session_ = OpenSession(4 << 20);
  std::promise<void> release;
  commits_.Submit([released = release.get_future().share()] { released.wait(); });
  const auto as = [this](const std::string& tenant) {
    CallContext context = context_;
    auto caller = std::make_shared<Tenant>();
    caller->name = tenant;
    context.caller.tenant = caller;
    return context;
  };
  // The fragments are zeros, each of which is refused.
  std::vector<uint64_t> offsets;
  for (int i = 0; i < kMany; ++i) offsets.push_back(ReserveOne());
  keyspace_ = keyspaces_->OpenKeyspace({{{"model", "tiny"}}, kGeometry, "large"}).value();
  v1::CommitResponse large;
  std::vector<std::string> ended;  // tenants in the order of the one commit thread
  std::promise<void> both;
  const auto end = [&](const std::string& name, const absl::Status& status) {
    EXPECT_TRUE(status.ok());
    ended.push_back(name);
    if (ended.size() == 2) both.set_value();
  };
  Commit(as("large"), *session_, Request(offsets), &large,
         [&](const absl::Status& status) { end("large", status); });
  const uint64_t offset = ReserveOne();
  keyspace_ = keyspaces_->OpenKeyspace({{{"model", "other"}}, kGeometry, "small"}).value();
  v1::CommitResponse small;
  Commit(as("small"), *session_, Request({offset}), &small,
         [&](const absl::Status& status) { end("small", status); });
  release.set_value();
  both.get_future().wait();
  EXPECT_EQ(large.outcomes_size(), kMany);
  EXPECT_EQ(ended, (std::vector<std::string>{"small", "large"}));
  EXPECT_EQ(session_->staging()->reservations(), 0u);
}

Limits OneCommitQueued() {
  Limits limits;
  limits.commit_queue = 1;
  limits.commit_threads = 1;
  return limits;
}

class CommitQueueTest : public CallFixture {
 protected:
  CommitQueueTest() : CallFixture(OneCommitQueued()) {}
};

TEST_F(CommitQueueTest, OverTheBoundTheResponseComesAtOnce) {
  const auto session = OpenSession();
  std::promise<void> release;
  std::promise<void> running;
  std::future<void> runs = running.get_future();
  // The task owns the objects that it waits for: the test may be over before it wakes.
  commits_.Submit([&running, released = release.get_future().share()] {
    running.set_value();
    released.wait();
  });
  runs.wait();
  commits_.Submit([] {});
  uint64_t offset = 0;
  ASSERT_TRUE(session->staging()->Reserve(fragment_bytes(), offset));
  v1::CommitRequest request;
  request.set_keyspace(std::string(keyspace_->id.view()));
  request.add_offsets(offset);
  request.add_header_offsets(tiles_bytes());
  v1::CommitResponse response;
  Completion completion;
  Commit(context_, *session, request, &response, completion.done());
  EXPECT_EQ(completion.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(session->staging()->reservations(), 0u);
  EXPECT_EQ(metrics_.rejected[static_cast<size_t>(Rejection::kCommitQueue)].value(), 1u);
  release.set_value();
}

}  // namespace
}  // namespace crumb::server
