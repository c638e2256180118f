// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of ranks of engines of different degrees with one crumbd.

#include <algorithm>
#include <set>

#include "client/worker/lead_token.h"
#include "gmock/gmock.h"
#include "rank_run.h"
#include "tests/client/forwarding_client.h"
#include "tests/client/rpc/crumbd_test.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

using std::chrono::seconds;

constexpr int kPrompt = 700;
constexpr int kPages = 10;
constexpr int kHit = 384;  // tokens of the prompt, 700 - 256 rounded down
constexpr int kSteps = 2;

// 3 layers and 4 KV heads, with different constants for every layer and head.
WorkerOptions Whole() {
  WorkerOptions options = SmallWorkerOptions();
  options.layers = 3;
  options.kv_heads = 4;
  options.q_heads = 16;
  RotationSet::Arrays arrays;
  arrays.layers = 3;
  arrays.kv_heads = 4;
  arrays.head_dim = 64;
  arrays.q_heads = 16;
  for (int layer = 0; layer < 3; ++layer) {
    for (int head = 0; head < 4; ++head) {
      const int shift = 1 + layer * 4 + head;  // a permutation is a rotation
      for (int i = 0; i < 64; ++i) {
        for (int c = 0; c < 64; ++c) {
          arrays.rotation_k.push_back((i + shift) % 64 == c ? 1.0f : 0.0f);
          arrays.rotation_v.push_back((i + 3 * shift) % 64 == c ? 1.0f : 0.0f);
        }
        arrays.mean_k.push_back(0.01f * static_cast<float>(shift * (i % 5)));
        arrays.mean_v.push_back(-0.02f * static_cast<float>(shift * (i % 3)));
      }
    }
    for (int q = 0; q < 16; ++q) arrays.shift.push_back(0.05f * static_cast<float>(layer + q % 7));
  }
  options.rotations = RotationSet::Of("test", std::move(arrays)).value();
  return options;
}

class RanksTest : public CrumbdTest {
 protected:
  void SetUp() override { StartCrumbd(); }

  // Opens an engine with a client per rank.
  RankRun Open(Degree degree, const WorkerOptions& options) {
    ClientOptions connection = Options();
    connection.engine = std::string(15, 'e') + static_cast<char>('a' + engines_++);
    std::vector<Client*> clients;
    for (int rank = 0; rank < degree.tp * degree.pp; ++rank) {
      clients_.push_back(Client::Open(connection).value());
      clients.push_back(clients_.back().get());
    }
    return RankRun(options, degree, clients);
  }
  RankRun Open(Degree degree) { return Open(degree, options_); }

  const std::vector<float>& Expected() {
    if (expected_.empty()) {
      RankRun alone(options_, {}, {nullptr});
      expected_ = alone.Run(model_, alone.Begin(model_, kPrompt), kPrompt, kSteps).values;
    }
    return expected_;
  }

  void ExpectHits(RankRun& run) {
    const auto outputs = run.Run(model_, run.Begin(model_, kPrompt), kPrompt, kSteps);
    EXPECT_EQ(outputs.cached, kHit);
    EXPECT_TRUE(outputs.values == Expected());
  }

  std::vector<TileRange> Ranges(int page) const {
    std::vector<TileRange> ranges;
    for (const auto& fragment : crumbd_->fragments(PageAt(page))) {
      ranges.push_back(fragment.header.range);
    }
    return ranges;
  }
  FakeCrumbd::PageId PageAt(int page) const {
    const KeyspaceId keyspace = crumbd_->pages().begin()->first.first;
    return {keyspace, PageKeysOf(keyspace, model_.tokens()).at(page)};
  }

  const WorkerOptions options_ = Whole();
  const SequenceModel model_{options_, RandomTokens(kPrompt + 10, 5)};
  std::vector<std::unique_ptr<Client>> clients_;

 private:
  int engines_ = 0;
  std::vector<float> expected_;
};

TEST_F(RanksTest, WhatOneRankWroteEveryDegreeReads) {
  RankRun writer = Open({});
  writer.Publish(model_, kPrompt);
  EXPECT_EQ(crumbd_->pages().size(), kPages);
  for (const Degree degree : {Degree{2, 1}, {8, 1}, {4, 1}, {1, 2}, {2, 3}, {16, 1}}) {
    SCOPED_TRACE(testing::Message() << "tp " << degree.tp << " pp " << degree.pp);
    const uint64_t joins = crumbd_->joins();
    RankRun reader = Open(degree);
    ExpectHits(reader);
    EXPECT_EQ(crumbd_->joins() - joins, reader.ranks() - 1);
    // In place: a part of the fragment that is there.
    for (int rank = 0; rank < reader.ranks(); ++rank) {
      EXPECT_EQ(reader.worker(rank).counters().verify_failures, 0);
      EXPECT_EQ(reader.worker(rank).counters().hit_tokens_host, kHit);
    }
  }
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
}

TEST_F(RanksTest, WhatEveryDegreeWroteEveryOtherReads) {
  const Degree degrees[] = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, 2}, {2, 2}, {1, 3}};
  for (const Degree written : degrees) {
    clients_.clear();
    crumbd_.reset();
    StartCrumbd();
    RankRun writer = Open(written);
    writer.Publish(model_, kPrompt);
    const int copies = std::max(1, written.tp / options_.kv_heads);
    EXPECT_EQ(Ranges(3).size(), written.tp / copies * written.pp);
    for (const Degree read : degrees) {
      SCOPED_TRACE(testing::Message() << "tp " << written.tp << " pp " << written.pp << " read by "
                                      << "tp " << read.tp << " pp " << read.pp);
      RankRun reader = Open(read);
      ExpectHits(reader);
    }
  }
}

TEST_F(RanksTest, ReplicatedHeadsAreCommittedOnce) {
  RankRun writer = Open({8, 1});
  writer.Publish(model_, kPrompt);
  for (int rank = 0; rank < 8; ++rank) {
    const WorkerCounters counters = writer.worker(rank).counters();
    EXPECT_EQ(counters.published_pages, rank % 2 == 0 ? kPages : 0);
    EXPECT_EQ(counters.deduplicated_pages, 0);
  }
}

TEST_F(RanksTest, TheFirstCommitOfATileStays) {
  RankRun two = Open({2, 1});
  two.Publish(model_, kPrompt);
  const std::vector<TileRange> first = Ranges(2);
  RankRun same = Open({2, 1});
  same.Publish(model_, kPrompt);
  RankRun wider = Open({});
  wider.Publish(model_, kPrompt);
  RankRun narrower = Open({4, 1});
  narrower.Publish(model_, kPrompt);
  EXPECT_EQ(same.worker(0).counters().deduplicated_pages, kPages);
  EXPECT_EQ(wider.worker(0).counters().deduplicated_pages, kPages);
  EXPECT_EQ(narrower.worker(3).counters().deduplicated_pages, kPages);
  EXPECT_TRUE(Ranges(2) == first);
}

TEST_F(RanksTest, PartsOfAPageServeWhoNeedsNoMore) {
  RankRun writer = Open({4, 1});
  // Heads 0 and 1 only, from a rank of degree 2: two of four ranks die before they publish.
  for (const int rank : {0, 1}) {
    SequenceOptions cold;
    const auto sequence = writer.worker(rank).Begin(model_.prompt(kPrompt), cold).value();
    const WorkerOptions& own = writer.options(rank);
    for (int layer = 0; layer < 3; ++layer) {
      std::vector<kernels::Bf16> rows(size_t{kPrompt} * own.own_kv_heads() * 64);
      ASSERT_TRUE(sequence->Append(layer, kPrompt, rows.data(), rows.data()).ok());
    }
    ASSERT_TRUE(sequence->Advance(model_.prompt(kPrompt)).ok());
    ASSERT_TRUE(sequence->Finish().ok());
    ASSERT_TRUE(writer.worker(rank).WaitPublished(seconds(20)).ok());
  }
  RankRun half = Open({2, 1});
  EXPECT_EQ(half.worker(0).Begin(model_.prompt(kPrompt)).value()->cached_tokens(), kHit);
  const auto other = half.worker(1).Begin(model_.prompt(kPrompt)).value();
  EXPECT_EQ(other->cached_tokens(), 0);
  EXPECT_EQ(other->stats().miss_reason, "not_covered");
  const auto whole = Open({}).worker(0).Begin(model_.prompt(kPrompt)).value();
  EXPECT_EQ(whole->stats().miss_reason, "not_covered");
  // All ranks of an engine get one prefix: a page that some rank cannot have is a miss for all.
  const auto led = half.worker(0).Lead(model_.prompt(kPrompt)).value();
  EXPECT_EQ(led.sequence->cached_tokens(), 0);
  EXPECT_EQ(led.sequence->stats().miss_reason, "not_covered");
}

TEST_F(RanksTest, ADamagedTileIsAMissForItsReadersOnly) {
  RankRun writer = Open({4, 1});
  writer.Publish(model_, kPrompt);
  // Head 2 of page 4. Ranks of degree 2 copy their part together, and verify the copy.
  for (const auto& fragment : crumbd_->fragments(PageAt(4))) {
    if (fragment.header.range.heads.begin == 2) crumbd_->Bytes(fragment)[100] ^= std::byte{1};
  }
  RankRun reader = Open({2, 1});
  EXPECT_EQ(reader.worker(0).Begin(model_.prompt(kPrompt)).value()->cached_tokens(), kHit);
  const auto hurt = reader.worker(1).Begin(model_.prompt(kPrompt)).value();
  EXPECT_EQ(hurt->cached_tokens(), 4 * 64);
  EXPECT_EQ(hurt->stats().miss_reason, "corrupt");

  // The leader does not read that tile; the follower's error says how far it gets.
  RankRun engine = Open({2, 1});
  const auto led = engine.worker(0).Lead(model_.prompt(kPrompt)).value();
  EXPECT_EQ(led.sequence->cached_tokens(), kHit);
  const auto refused = engine.worker(1).Follow(led.token, model_.prompt(kPrompt));
  EXPECT_TRUE(absl::IsAborted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), testing::HasSubstr("256"));
  SequenceOptions less;
  less.cached_tokens_max = 256;
  const auto outputs = engine.Run(model_, engine.Begin(model_, kPrompt, less), kPrompt, kSteps);
  EXPECT_EQ(outputs.cached, 256);
  EXPECT_TRUE(outputs.values == Expected());
}

TEST_F(RanksTest, TheLeadersLeaseHoldsUntilTheLastFollowerEnds) {
  RankRun writer = Open({8, 1});
  writer.Publish(model_, kPrompt);
  RankRun reader = Open({2, 1});
  auto led = reader.worker(0).Lead(model_.prompt(kPrompt)).value();
  EXPECT_EQ(crumbd_->leases(), 1);  // although the leader's part was copied together
  auto follower = reader.worker(1).Follow(led.token, model_.prompt(kPrompt)).value();
  led.sequence.reset();
  follower.reset();
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
  // A token outlives its lease: a late follower looks the pages up itself.
  const uint64_t joins = crumbd_->joins();
  EXPECT_EQ(reader.worker(1).Follow(led.token, model_.prompt(kPrompt)).value()->cached_tokens(),
            kHit);
  EXPECT_EQ(crumbd_->joins(), joins);
  // If the pages are gone too, it returns an error.
  for (int page = 2; page < kPages; ++page) crumbd_->Drop(PageAt(page));
  const auto late = reader.worker(1).Follow(led.token, model_.prompt(kPrompt));
  EXPECT_TRUE(absl::IsAborted(late.status())) << late.status();
}

// A client whose crumbd is replaced between a look at its epoch and the Acquire that joins a lease.
class RestartingClient final : public ForwardingClient {
 public:
  explicit RestartingClient(Client& to) : ForwardingClient(to), to_(to) {}

  std::unique_ptr<PendingAcquire> StartAcquire(const AcquireRequest& request) override {
    if (request.lease == 0) {
      ++own_leases;
      return ForwardingClient::StartAcquire(request);
    }
    ++joins;
    return std::make_unique<Response>(to_.StartAcquire(request), to_.epoch() + 1);
  }

  int joins = 0;
  int own_leases = 0;

 private:
  class Response final : public PendingAcquire {
   public:
    Response(std::unique_ptr<PendingAcquire> of, uint64_t epoch)
        : of_(std::move(of)), epoch_(epoch) {}
    bool Ready() override { return of_->Ready(); }
    absl::StatusOr<AcquireResult> Finish() override {
      auto result = of_->Finish();
      if (!result.ok() || result->lease == nullptr) return result;
      const auto fragments = result->lease->fragments();
      result->lease = std::make_shared<const Lease>(
          std::vector<LeasedFragment>(fragments.begin(), fragments.end()),
          std::vector<DeviceFragment>(), nullptr, epoch_,
          std::const_pointer_cast<Lease>(result->lease));
      return result;
    }

   private:
    const std::unique_ptr<PendingAcquire> of_;
    const uint64_t epoch_;
  };

  Client& to_;
};

TEST_F(RanksTest, ALeaseThatAnotherCrumbdJoinedIsNotUsed) {
  RankRun writer = Open({});
  writer.Publish(model_, kPrompt);
  ClientOptions connection = Options();
  connection.engine = "restarted engine";
  const auto leader = Client::Open(connection).value();
  const auto follower = Client::Open(connection).value();
  RestartingClient restarting(*follower);
  RankRun reader(options_, {2, 1}, {leader.get(), &restarting});
  const auto led = reader.worker(0).Lead(model_.prompt(kPrompt)).value();
  ASSERT_EQ(led.sequence->cached_tokens(), kHit);
  const auto followed = reader.worker(1).Follow(led.token, model_.prompt(kPrompt)).value();
  EXPECT_EQ(followed->cached_tokens(), kHit);
  EXPECT_EQ(restarting.joins, 1);
  EXPECT_EQ(restarting.own_leases, 1);  // holds the pages that it attends
}

TEST_F(RanksTest, AnAcquireThatJoinsALeaseOfAnotherCrumbdFails) {
  RankRun writer = Open({});
  writer.Publish(model_, kPrompt);
  const auto client = Client::Open(Options()).value();
  ASSERT_TRUE(client->WaitConnected(seconds(60)));
  const PageKey key = PageAt(0).second;
  AcquireRequest request;
  request.keyspace = PageAt(0).first;
  request.generation = 1;
  request.keys = {&key, 1};
  const auto given = client->Acquire(request).value();
  ASSERT_EQ(given.hit_pages, 1);
  request.lease = given.lease_id;
  request.lease_epoch = client->epoch() + 1;
  EXPECT_TRUE(absl::IsAborted(client->Acquire(request).status()));
  request.lease_epoch = client->epoch();
  EXPECT_EQ(client->Acquire(request).value().hit_pages, 1);
}

TEST_F(RanksTest, LiveSequencesSharePagesUnderOnePrefix) {
  RankRun writer = Open({});
  writer.Publish(model_, kPrompt);
  RankRun reader = Open({2, 1});
  const auto first = reader.Begin(model_, kPrompt);
  const auto second = reader.Begin(model_, kPrompt);
  for (const auto& sequence : second) {
    EXPECT_EQ(sequence->stats().hit_tokens_worker, kHit);
    EXPECT_EQ(sequence->stats().fetched_bytes, 0);
  }
  EXPECT_TRUE(reader.Run(model_, second, kPrompt, kSteps).values == Expected());
}

TEST_F(RanksTest, WithoutCrumbdNothingIsCachedAndAllRanksAgree) {
  RankRun alone(options_, {4, 2}, std::vector<Client*>(8, nullptr));
  const auto outputs = alone.Run(model_, alone.Begin(model_, kPrompt), kPrompt, kSteps);
  EXPECT_EQ(outputs.cached, 0);
  EXPECT_TRUE(outputs.values == Expected());
}

TEST_F(RanksTest, TokensOfOthersAreRefused) {
  RankRun writer = Open({});
  writer.Publish(model_, kPrompt);
  RankRun reader = Open({2, 1});
  const LedSequence led = reader.worker(0).Lead(model_.prompt(kPrompt)).value();
  Worker& follower = reader.worker(1);
  const auto code = [&](const std::string& token, const SequenceModel& model, int prompt) {
    return follower.Follow(token, model.prompt(prompt)).status().code();
  };
  const SequenceModel other(options_, RandomTokens(kPrompt, 6));
  EXPECT_EQ(code(led.token, other, kPrompt), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(led.token, model_, 600), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(led.token, model_, 30), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code("", model_, kPrompt), absl::StatusCode::kDataLoss);
  for (size_t size = 0; size < led.token.size(); ++size) {
    EXPECT_EQ(code(led.token.substr(0, size), model_, kPrompt), absl::StatusCode::kDataLoss);
  }
  for (size_t bit = 0; bit < led.token.size() * 8; ++bit) {
    std::string damaged = led.token;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    const auto got = code(damaged, model_, kPrompt);
    EXPECT_TRUE(got == absl::StatusCode::kDataLoss || got == absl::StatusCode::kFailedPrecondition)
        << bit;
  }
  WorkerOptions foreign = options_;
  foreign.weights = "others";
  RankRun strangers = Open({2, 1}, foreign);
  EXPECT_TRUE(absl::IsInvalidArgument(
      strangers.worker(1).Follow(led.token, model_.prompt(kPrompt)).status()));
  EXPECT_EQ(code(led.token, model_, kPrompt), absl::StatusCode::kOk);
}

TEST_F(RanksTest, QualitySamplesNameTheModelsLayers) {
  WorkerOptions options = options_;
  options.watch_every = 1;
  RankRun run = Open({1, 3}, options);
  run.Run(model_, run.Begin(model_, 400), 400, 0);
  EXPECT_TRUE(Eventually([&] { return crumbd_->quality_layers() == std::set<uint32_t>{0, 1, 2}; }));
}

}  // namespace
}  // namespace crumb::client
