// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/worker.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "client/worker/segment_rule.h"
#include "gmock/gmock.h"
#include "kernels/bf16.h"
#include "tests/client/rpc/crumbd_test.h"
#include "tests/common/eventually.h"

namespace crumb::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class WorkerTest : public CrumbdTest {
 protected:
  // Returns the bytes of every page that crumbd holds, by key.
  std::map<PageKey, std::string> PageBytes() const {
    std::map<PageKey, std::string> out;
    for (const auto& [id, page] : crumbd_->pages()) {
      const auto tiles = crumbd_->Bytes(page).first(page.tiles_bytes);
      out[id.second] = std::string(reinterpret_cast<const char*>(tiles.data()), tiles.size());
    }
    return out;
  }

  // Returns the page of `model`'s tokens at index `page`.
  FakeCrumbd::PageId PageAt(const SequenceModel& model, int page) const {
    const KeyspaceId keyspace = crumbd_->pages().begin()->first.first;
    return {keyspace, PageKeysOf(keyspace, model.tokens()).at(page)};
  }

  // Returns the outputs of 5 decode steps after a prompt of 1,100 tokens.
  static std::vector<float> Decode(const SequenceModel& model, Sequence& sequence) {
    if (sequence.length() < 1100) model.Pass(sequence, 1100);
    std::vector<float> outputs;
    for (int i = 0; i < 5; ++i) {
      const auto out = model.Pass(sequence, sequence.length() + 1);
      outputs.insert(outputs.end(), out.begin(), out.end());
    }
    return outputs;
  }

  const WorkerOptions options_ = SmallWorkerOptions();
  const SequenceModel model_{options_, RandomTokens(1300, 99)};
};

TEST_F(WorkerTest, AnotherWorkerHitsAndGetsTheSameOutputs) {
  StartCrumbd();
  const auto alone = OpenWorker(options_, nullptr);
  const auto cold = alone->Begin(model_.prompt(1100)).value();
  const std::vector<float> expected = Decode(model_, *cold);

  const auto writer_client = OpenClient();
  const auto writer = OpenWorker(options_, writer_client.get());
  PublishPrompt(*writer, model_, 1100);
  EXPECT_EQ(writer->counters().published_pages, 17);  // 1,100 / 64, including those in the window
  EXPECT_EQ(crumbd_->pages().size(), 17);

  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  {
    const auto warm = worker->Begin(model_.prompt(1100)).value();
    EXPECT_EQ(warm->cached_tokens(), 832);
    EXPECT_EQ(warm->stats().hit_tokens_host, 832);
    EXPECT_EQ(warm->stats().fetched_bytes,
              options_.layers * options_.kv_heads *
                  (options_.tile_shape().bf16_bytes() + 12 * options_.tile_shape().int2_bytes()));
    EXPECT_TRUE(Decode(model_, *warm) == expected);
    EXPECT_EQ(crumbd_->leases(), 1);
    // Another sequence of this worker uses the lease's pages without a request.
    const uint64_t acquires = crumbd_->acquires();
    const auto shared = worker->Begin(model_.prompt(1100)).value();
    EXPECT_EQ(shared->stats().hit_tokens_worker, 832);
    EXPECT_EQ(crumbd_->acquires(), acquires);
    EXPECT_TRUE(Decode(model_, *shared) == expected);
  }
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
  EXPECT_TRUE(Eventually([&] { return crumbd_->counters().used_tokens() == 832; }));
  EXPECT_EQ(crumbd_->counters().prefill_tokens_avoided(), 832);
  // A block of the prompt ended in the part that both warm sequences computed: three pages each.
  EXPECT_TRUE(worker->WaitPublished(seconds(20)).ok());
  EXPECT_EQ(worker->counters().deduplicated_pages, 6);
  EXPECT_EQ(crumbd_->reservations(), 0);
}

TEST_F(WorkerTest, PageBytesDependOnTokensOnly) {
  std::map<PageKey, std::string> first;
  for (const int chunk : {64, 300, 1290}) {
    StartCrumbd();
    const auto client = OpenClient();
    const auto worker = OpenWorker(options_, client.get());
    // A prompt of 1,290 in chunks, against one of 200 followed by 1,090 decode steps.
    const int prompt = chunk == 64 ? 200 : 1290;
    const auto sequence = worker->Begin(model_.prompt(prompt)).value();
    while (sequence->length() < 1290) {
      const int step = sequence->length() < prompt ? chunk : 1;
      const int end = sequence->length() < prompt ? prompt : 1290;
      model_.Pass(*sequence, std::min(end, sequence->length() + step));
    }
    ASSERT_TRUE(sequence->Finish().ok());
    ASSERT_TRUE(worker->WaitPublished(seconds(20)).ok());
    const auto pages = PageBytes();
    EXPECT_EQ(pages.size(), 20);
    if (first.empty()) first = pages;
    EXPECT_TRUE(pages == first) << "chunk " << chunk;
    crumbd_.reset();
  }
}

TEST_F(WorkerTest, HeadersNameTheChain) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  PublishPrompt(*worker, model_, 700);
  const auto pages = crumbd_->pages();
  ASSERT_EQ(pages.size(), 10);
  for (int i = 0; i < 10; ++i) {
    const FragmentHeader& header = pages.at(PageAt(model_, i)).header;
    EXPECT_EQ(header.format, i == 0 ? PageFormat::kBf16 : PageFormat::kInt2);
    EXPECT_EQ(header.parent, i == 0 ? PageKey{} : PageAt(model_, i - 1).second);
    EXPECT_EQ(header.range, (TileRange{{0, 2}, {0, 2}}));
    // The first prefill block of 512 attends BF16 only; page 8 begins the second block.
    EXPECT_EQ(header.over_int2_prefix, i >= 8) << i;
  }
}

TEST_F(WorkerTest, PublishesWhatTheSequenceAllows) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  for (const Publish publish : {Publish::kNone, Publish::kPrompt}) {
    SequenceOptions sequence_options;
    sequence_options.publish = publish;
    const auto sequence = worker->Begin(model_.prompt(200), sequence_options).value();
    model_.Pass(*sequence, 200);
    while (sequence->length() < 500) model_.Pass(*sequence, sequence->length() + 1);
    ASSERT_TRUE(sequence->Finish().ok());
    ASSERT_TRUE(worker->WaitPublished(seconds(20)).ok());
    EXPECT_EQ(crumbd_->pages().size(), publish == Publish::kNone ? 0 : 3);
  }
}

TEST_F(WorkerTest, GeneratedTokensHitInTheNextTurn) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  {
    const auto turn = worker->Begin(model_.prompt(300)).value();
    model_.Pass(*turn, 300);
    while (turn->length() < 900) model_.Pass(*turn, turn->length() + 1);
    ASSERT_TRUE(turn->Finish().ok());
    ASSERT_TRUE(worker->WaitPublished(seconds(20)).ok());
  }
  EXPECT_EQ(worker->Begin(model_.prompt(1200)).value()->cached_tokens(), 896);
}

TEST_F(WorkerTest, Bf16HistoryHasAKeyspaceOfItsOwn) {
  StartCrumbd();
  const auto client = OpenClient();
  WorkerOptions bf16 = options_;
  bf16.history_format = kernels::PageFormat::kBf16;
  const auto int2_worker = OpenWorker(options_, client.get());
  const auto bf16_worker = OpenWorker(bf16, client.get());
  PublishPrompt(*int2_worker, model_, 1100);
  EXPECT_EQ(bf16_worker->Begin(model_.prompt(1100)).value()->cached_tokens(), 0);
  PublishPrompt(*bf16_worker, model_, 1100);
  const auto warm = bf16_worker->Begin(model_.prompt(1100)).value();
  EXPECT_EQ(warm->cached_tokens(), 832);
  const auto alone = OpenWorker(bf16, nullptr);
  const auto cold = alone->Begin(model_.prompt(1100)).value();
  EXPECT_TRUE(Decode(model_, *warm) == Decode(model_, *cold));
}

TEST_F(WorkerTest, KeyspaceInStateBf16MovesNewSequences) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  PublishPrompt(*worker, model_, 1100);
  const KeyspaceId int2 = crumbd_->pages().begin()->first.first;
  crumbd_->bf16_only = true;
  crumbd_->PushState(int2, v1::KEYSPACE_STATE_BF16);
  ASSERT_TRUE(Eventually([&] { return client->StateOf(int2) == KeyspaceState::kBf16; }));
  const auto moved = worker->Begin(model_.prompt(1100)).value();
  EXPECT_EQ(moved->cached_tokens(), 0);
  model_.Pass(*moved, 1100);
  EXPECT_NEAR(moved->stats().bits_per_element(), 16.0, 1e-9);
  crumbd_->bf16_only = false;
  crumbd_->PushState(int2, v1::KEYSPACE_STATE_ACTIVE);
  ASSERT_TRUE(Eventually([&] { return client->StateOf(int2) == KeyspaceState::kActive; }));
  EXPECT_EQ(worker->Begin(model_.prompt(1100)).value()->cached_tokens(), 832);
}

TEST_F(WorkerTest, TheQualityWatchGivesTheKeyspaceUpAndOnlyACommandBringsItBack) {
  StartCrumbd();
  const auto client = OpenClient();
  WorkerOptions options = options_;
  options.watch_every = 1;
  options.watch_windows = 4;
  options.watch_error_max = 0.01f;  // INT2 errors are always larger
  const auto worker = OpenWorker(options, client.get());
  const auto read = [&](int chunk) {
    const auto sequence = worker->Begin(model_.prompt(1100)).value();
    while (sequence->length() < 1100) {
      model_.Pass(*sequence, std::min(1100, sequence->length() + chunk));
    }
    EXPECT_TRUE(sequence->Finish().ok());
    EXPECT_TRUE(worker->WaitPublished(seconds(20)).ok());
    return sequence->stats().bits_per_element();
  };
  const auto bits_now = [&] {
    const auto sequence = worker->Begin(model_.prompt(1100)).value();
    model_.Pass(*sequence, 1100);
    return sequence->stats().bits_per_element();
  };
  read(300);
  EXPECT_GE(worker->counters().windows_measured, 4);
  EXPECT_GE(worker->counters().quality_alarms, 1);
  ASSERT_TRUE(Eventually([&] { return crumbd_->bf16_only.load(); }));
  EXPECT_THAT(crumbd_->state_reason(), testing::HasSubstr("quality watch: mean attention error"));
  EXPECT_TRUE(Eventually([&] {
    return crumbd_->quality_samples() == worker->counters().windows_measured * options.layers;
  }));
  EXPECT_TRUE(Eventually([&] { return bits_now() == 16.0; }));

  const KeyspaceId int2 = crumbd_->pages().begin()->first.first;
  crumbd_->bf16_only = false;
  crumbd_->PushState(int2, v1::KEYSPACE_STATE_ACTIVE);
  ASSERT_TRUE(Eventually([&] { return client->StateOf(int2) == KeyspaceState::kActive; }));
  EXPECT_LT(bits_now(), 16.0);
}

TEST_F(WorkerTest, WithoutCrumbdTheQualityWatchActsAlone) {
  WorkerOptions options = options_;
  options.watch_every = 1;
  options.watch_windows = 4;
  options.watch_error_max = 0.01f;
  const auto client = OpenClient();  // there is no crumbd
  const auto worker = OpenWorker(options, client.get());
  const auto bits = [&] {
    const auto sequence = worker->Begin(model_.prompt(1100)).value();
    while (sequence->length() < 1100) {
      model_.Pass(*sequence, std::min(1100, sequence->length() + 300));
    }
    return sequence->stats().bits_per_element();
  };
  EXPECT_LT(bits(), 16.0);
  EXPECT_EQ(bits(), 16.0);
  // The decision is reported once crumbd is connected.
  StartCrumbd();
  ASSERT_TRUE(client->WaitConnected(seconds(20)));
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(worker->Begin(model_.prompt(100)).value()->cached_tokens() % 64, 0);
    return crumbd_->bf16_only.load();
  }));
}

// Damages page 5 of 17 in one way; the pages before it hit, that page and those behind it do not.
class DamageTest : public WorkerTest, public testing::WithParamInterface<std::string> {};

TEST_P(DamageTest, IsAMissAndNeverUsed) {
  StartCrumbd();
  const auto writer_client = OpenClient();
  const auto writer = OpenWorker(options_, writer_client.get());
  PublishPrompt(*writer, model_, 1100);
  const FakeCrumbd::PageId victim = PageAt(model_, 5);
  const FakeCrumbd::Page page = crumbd_->pages().at(victim);
  const std::span<std::byte> bytes = crumbd_->Bytes(page);
  FragmentHeader header = page.header;
  if (GetParam() == "tile bit") bytes[100] ^= std::byte{1};
  if (GetParam() == "header bit") bytes[page.tiles_bytes + 70] ^= std::byte{1};
  if (GetParam() == "no header") std::memset(bytes.data() + page.tiles_bytes, 0, 16);
  if (GetParam() == "another page") crumbd_->Swap(victim, PageAt(model_, 9));
  if (GetParam() == "keyspace") header.keyspace.bytes[0] ^= 1;
  if (GetParam() == "generation") header.generation = 0;
  if (GetParam() == "range") header.range.heads.end = 1, header.tile_sums.resize(2);
  if (GetParam() == "format") header.format = PageFormat::kBf16;
  if (GetParam() == "layout") header.layout_id = 7;
  if (header != page.header) {
    EncodeFragmentHeader(
        header, bytes.subspan(page.tiles_bytes, FragmentHeaderBytes(header.range.tiles())));
  }

  WorkerOptions options = options_;
  options.verify_every = 1;
  const auto client = OpenClient();
  const auto worker = OpenWorker(options, client.get());
  const auto sequence = worker->Begin(model_.prompt(1100)).value();
  EXPECT_EQ(sequence->cached_tokens(), 5 * 64);
  const bool stale = GetParam() == "generation";
  EXPECT_EQ(sequence->stats().miss_reason, stale ? "generation" : "corrupt");
  EXPECT_EQ(worker->counters().verify_failures, stale ? 0 : 1);
  const auto alone = OpenWorker(options_, nullptr);
  const auto cold = alone->Begin(model_.prompt(1100)).value();
  EXPECT_TRUE(Decode(model_, *sequence) == Decode(model_, *cold));
}

INSTANTIATE_TEST_SUITE_P(Ways, DamageTest,
                         testing::Values("tile bit", "header bit", "no header", "another page",
                                         "keyspace", "generation", "range", "format", "layout"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST_F(WorkerTest, NonFiniteWindowsAreNeverPublished) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  const auto sequence = worker->Begin(model_.prompt(700)).value();
  for (int layer = 0; layer < options_.layers; ++layer) {
    auto v = model_.Values(layer, 0, 700);
    v[400 * options_.kv_heads * options_.head_dim] =
        kernels::Bf16FromFloat(std::numeric_limits<float>::quiet_NaN());
    ASSERT_TRUE(sequence->Append(layer, 700, model_.Keys(layer, 0, 700).data(), v.data()).ok());
  }
  ASSERT_TRUE(sequence->Advance(model_.prompt(700)).ok());
  ASSERT_TRUE(sequence->Finish().ok());
  ASSERT_TRUE(worker->WaitPublished(seconds(20)).ok());
  EXPECT_EQ(crumbd_->pages().size(), 6);  // tokens 0 to 383; the value lies in page 6
  EXPECT_EQ(worker->counters().windows_refused, 1);
  EXPECT_TRUE(Eventually([&] { return crumbd_->counters().windows_refused() == 1; }));
}

TEST_F(WorkerTest, FullQueueDropsAndNeverBlocks) {
  StartCrumbd();
  WorkerOptions options = options_;
  options.publish_queue_max = 3;
  options.publish_batch = 1;
  options.publish_deadline = seconds(20);
  const auto client = OpenClient();
  const auto worker = OpenWorker(options, client.get());
  crumbd_->block_commit = true;
  const auto sequence = worker->Begin(model_.prompt(1100)).value();
  model_.Pass(*sequence, 1100);
  ASSERT_TRUE(sequence->Finish().ok());
  const WorkerCounters counters = worker->counters();
  // At most one page is being published, three wait.
  EXPECT_GE(counters.publish_dropped_queue, 13);
  EXPECT_LE(counters.publish_dropped_queue, 14);
  crumbd_->block_commit = false;
  ASSERT_TRUE(worker->WaitPublished(seconds(20)).ok());
  EXPECT_EQ(worker->counters().published_pages, 17 - counters.publish_dropped_queue);
  EXPECT_TRUE(Eventually([&] {
    return crumbd_->counters().publish_dropped_pages() == counters.publish_dropped_queue;
  }));
}

TEST_F(WorkerTest, NoStagingRoomDrops) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  crumbd_->no_staging_room = true;
  PublishPrompt(*worker, model_, 1100);
  EXPECT_EQ(worker->counters().publish_dropped_room, 17);
  crumbd_->no_staging_room = false;
  PublishPrompt(*worker, model_, 1100);
  EXPECT_EQ(worker->counters().published_pages, 17);
  EXPECT_EQ(crumbd_->reservations(), 0);
}

TEST_F(WorkerTest, RefusedCommitsAreCountedAndTheKeyspaceIsRequestedAgain) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  crumbd_->generation = 2;  // drops the keyspace, so that the worker's binding is stale
  PublishPrompt(*worker, model_, 700);
  EXPECT_EQ(worker->counters().publish_refused, 10);
  PublishPrompt(*worker, model_, 700);
  EXPECT_EQ(worker->counters().published_pages, 10);
}

TEST_F(WorkerTest, LateCrumbdIsAMiss) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  PublishPrompt(*worker, model_, 1100);
  crumbd_->block_acquire = true;
  SequenceOptions hurry;
  hurry.deadline = milliseconds(30);
  const TimePoint start = Clock::Real().Now();
  const auto sequence = worker->Begin(model_.prompt(1100), hurry).value();
  EXPECT_LT(Clock::Real().Now() - start, seconds(5));
  EXPECT_EQ(sequence->cached_tokens(), 0);
  EXPECT_EQ(sequence->stats().miss_reason, "deadline");
  EXPECT_EQ(worker->counters().deadline_exceeded, 1);
  crumbd_->block_acquire = false;
  // The fake still grants the lease; the client returns a lease whose response did not arrive.
  EXPECT_EQ(worker->Begin(model_.prompt(1100)).value()->cached_tokens(), 832);
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
}

TEST_F(WorkerTest, WorksWithoutCrumbd) {
  const auto client = OpenClient();
  EXPECT_FALSE(client->connected());
  const auto worker = OpenWorker(options_, client.get());
  const auto sequence = worker->Begin(model_.prompt(1100)).value();
  const auto alone = OpenWorker(options_, nullptr);
  const auto cold = alone->Begin(model_.prompt(1100)).value();
  EXPECT_TRUE(Decode(model_, *sequence) == Decode(model_, *cold));
  ASSERT_TRUE(sequence->Finish().ok());
  EXPECT_TRUE(worker->WaitPublished(seconds(20)).ok());
  EXPECT_EQ(worker->counters().publish_dropped_unavailable, 17);
}

TEST_F(WorkerTest, GoesOnWhenCrumbdDiesAndComesBackEmpty) {
  StartCrumbd(1);
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  PublishPrompt(*worker, model_, 1100);
  auto warm = worker->Begin(model_.prompt(1100)).value();
  ASSERT_EQ(warm->cached_tokens(), 832);
  crumbd_.reset();
  ASSERT_TRUE(Eventually([&] { return !client->connected(); }));

  // The sequence attends pages of a dead crumbd.
  const auto alone = OpenWorker(options_, nullptr);
  const auto cold = alone->Begin(model_.prompt(1100)).value();
  EXPECT_TRUE(Decode(model_, *warm) == Decode(model_, *cold));
  const SequenceModel other(options_, RandomTokens(1300, 100));
  {
    const auto miss = worker->Begin(other.prompt(1100)).value();
    EXPECT_EQ(miss->cached_tokens(), 0);
    EXPECT_EQ(miss->stats().miss_reason, "unavailable");
    EXPECT_TRUE(Decode(other, *miss).size() > 0);
  }

  StartCrumbd(2);
  ASSERT_TRUE(client->WaitConnected(seconds(20)));
  EXPECT_EQ(client->epoch(), 2);
  PublishPrompt(*worker, other, 1100);
  EXPECT_EQ(worker->Begin(other.prompt(1100)).value()->cached_tokens(), 832);
  // Mappings of both connections are in use.
  const auto more = model_.Pass(*warm, warm->length() + 1);
  EXPECT_TRUE(more == model_.Pass(*cold, cold->length() + 1));
  warm.reset();
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0; }));
}

TEST_F(WorkerTest, ABrokenStreamKeepsLeasesAndOpensAnotherSession) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  PublishPrompt(*worker, model_, 1100);
  auto warm = worker->Begin(model_.prompt(1100)).value();
  ASSERT_EQ(crumbd_->sessions(), 1);
  crumbd_->BreakStreams();
  ASSERT_TRUE(Eventually([&] { return crumbd_->sessions() == 2; }));
  EXPECT_EQ(crumbd_->leases(), 1);
  const auto alone = OpenWorker(options_, nullptr);
  const auto cold = alone->Begin(model_.prompt(1100)).value();
  EXPECT_TRUE(Decode(model_, *warm) == Decode(model_, *cold));
  warm.reset();
  EXPECT_TRUE(Eventually([&] { return crumbd_->leases() == 0 && crumbd_->sessions() == 1; }));
}

TEST_F(WorkerTest, AForkedChildGoesOnWithItsSequences) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  PublishPrompt(*worker, model_, 1100);
  auto warm = worker->Begin(model_.prompt(1100)).value();
  model_.Pass(*warm, 1100);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    const std::vector<float> outputs = Decode(model_, *warm);
    const bool finished = warm->Finish().ok();
    warm.reset();
    const auto next = worker->Begin(model_.prompt(1100)).value();
    const bool apart = next->cached_tokens() == 0 && worker->WaitPublished(seconds(5)).ok();
    const auto alone = OpenWorker(options_, nullptr);
    const auto cold = alone->Begin(model_.prompt(1100)).value();
    ::_exit(!finished ? 1 : !apart ? 2 : outputs == Decode(model_, *cold) ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(crumbd_->leases(), 1);
  EXPECT_TRUE(Decode(model_, *warm).size() > 0);
}

TEST_F(WorkerTest, SsdHitsAreCountedByTier) {
  StartCrumbd();
  const auto client = OpenClient();
  const auto worker = OpenWorker(options_, client.get());
  PublishPrompt(*worker, model_, 1100);
  crumbd_->tier = v1::TIER_SSD;
  const auto sequence = worker->Begin(model_.prompt(1100)).value();
  EXPECT_EQ(sequence->stats().hit_tokens_ssd, 832);
  EXPECT_EQ(worker->counters().hit_tokens_ssd, 832);
  EXPECT_EQ(sequence->stats().hit_tokens_host, 0);
}

}  // namespace
}  // namespace crumb::client
