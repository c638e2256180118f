// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of the GPU back end on a simulated device with a real crumbd.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "client/gpu/device/arena_pinner.h"
#include "client/worker/keyspace_binding.h"
#include "crumb/client.h"
#include "crumb/device_worker.h"
#include "crumb/worker.h"
#include "gtest/gtest.h"
#include "tests/client/forwarding_client.h"
#include "tests/client/gpu/device_run.h"
#include "tests/client/gpu/worker_pair.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"

namespace crumb::client {
namespace {

constexpr int kPrompt = 1100;
constexpr int kHit = 832;

// Options with small pieces, so that pages cross their ends.
DeviceWorkerOptions InPieces() {
  DeviceWorkerOptions options = SmallDevice();
  options.pin_piece_bytes = 1 << 20;
  return options;
}

DeviceWorkerOptions Pooled() {
  DeviceWorkerOptions options = InPieces();
  options.pool_bytes = options.pool_sink_bytes = 8 << 20;
  options.pool_handle_bytes = 2 << 20;
  options.pool_blank_pages = 32;
  return options;
}

// Blocks until slots of both pools are ready.
void AwaitBlank(const DeviceWorker& worker) {
  const TimePoint deadline = Clock::Real().Now() + kPatience;
  const int wanted = Pooled().pool_blank_pages + Pooled().pool_blank_sinks;
  while (worker.pool_use().blank_slots < static_cast<uint64_t>(wanted)) {
    ASSERT_LT(Clock::Real().Now(), deadline);
    std::this_thread::yield();
  }
}

std::unique_ptr<Client> OpenClient(const std::string& dir) {
  ClientOptions options;
  options.socket_dir = dir;
  options.staging_bytes = 8 << 20;
  options.backoff_min = std::chrono::milliseconds(10);
  options.backoff_max = std::chrono::milliseconds(100);
  return Client::Open(options).value();
}

SequenceOptions Patient() {
  SequenceOptions options;
  options.deadline = std::chrono::seconds(20);
  return options;
}

// Reads the rest of the prompt, then decodes; returns the outputs of the decode passes.
std::vector<float> Play(DeviceRun& prompts, DeviceRun& decode, const SequenceModel& model,
                        DeviceSequence& sequence) {
  while (sequence.length() < kPrompt) {
    const int tokens = std::min(400, sequence.pass_tokens_max());
    prompts.Pass({{&sequence, &model, sequence.length() + tokens, tokens}});
  }
  std::vector<float> outputs;
  for (int i = 0; i < 5; ++i) {
    const auto pass = decode.Pass({{&sequence, &model, sequence.length() + 1, 1}});
    const std::vector<float> out = pass->Outputs(0);
    outputs.insert(outputs.end(), out.begin(), out.end());
  }
  return outputs;
}

std::vector<float> PlayOnCpu(const SequenceModel& model, Sequence& sequence) {
  if (sequence.length() < kPrompt) model.Pass(sequence, kPrompt);
  std::vector<float> outputs;
  for (int i = 0; i < 5; ++i) {
    const auto out = model.Pass(sequence, sequence.length() + 1);
    outputs.insert(outputs.end(), out.begin(), out.end());
  }
  return outputs;
}

double Worst(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0.0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max<double>(worst, std::abs(a[i] - b[i]));
  return worst;
}

class DeviceCrumbdTest : public testing::TestWithParam<uint32_t> {
 protected:
  DeviceCrumbdTest() : model_(PairOptions(), RandomTokens(kPrompt + 100, 42)), device_(GetParam()) {
    EXPECT_TRUE(crumbd_.Start());
    client_ = OpenClient(folder_.path());
    EXPECT_TRUE(client_->WaitConnected(std::chrono::seconds(20)));
  }
  std::unique_ptr<DeviceWorker> OpenDeviceWorker() {
    auto worker = DeviceWorker::Open(PairOptions(), InPieces(), client_.get(), device_);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return std::move(worker).value();
  }

  TemporaryFolder folder_;
  fault::CrumbdProcess crumbd_{folder_.path(), {}};
  const SequenceModel model_;
  SimulatedDevice device_;
  std::unique_ptr<Client> client_;
};

TEST_P(DeviceCrumbdTest, PagesGoFromCpuToDeviceAndBack) {
  std::vector<float> expected;
  {
    auto cpu_client = OpenClient(folder_.path());
    ASSERT_TRUE(cpu_client->WaitConnected(std::chrono::seconds(20)));
    const auto cpu = Worker::Open(PairOptions(), cpu_client.get()).value();
    const auto cold = cpu->Begin(model_.prompt(kPrompt)).value();
    PlayOnCpu(model_, *cold);
    ASSERT_TRUE(cold->Finish().ok());
    ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
    const auto warm = cpu->Begin(model_.prompt(kPrompt), Patient()).value();
    ASSERT_EQ(warm->cached_tokens(), kHit);
    expected = PlayOnCpu(model_, *warm);
  }
  const SequenceModel other(PairOptions(), RandomTokens(kPrompt + 100, 43));
  {
    const auto worker = OpenDeviceWorker();
    DeviceRun prompts(device_, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
    DeviceRun decode(device_, *worker, {});
    auto hit = worker->Begin(model_.prompt(kPrompt), Patient()).value();
    EXPECT_EQ(hit->cached_tokens(), kHit);
    EXPECT_LT(Worst(Play(prompts, decode, model_, *hit), expected), 2e-5);
    auto cold = worker->Begin(other.prompt(kPrompt), Patient()).value();
    EXPECT_EQ(cold->cached_tokens(), 0);
    Play(prompts, decode, other, *cold);
    ASSERT_TRUE(decode.batch().Finish(*cold).ok());
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
    EXPECT_EQ(worker->counters().published_pages, 17u);
    EXPECT_EQ(worker->counters().publish_refused, 0u);
    EXPECT_EQ(worker->counters().verify_failures, 0u);
  }
  EXPECT_EQ(device_.live_allocations(), 0u);
  EXPECT_EQ(device_.pinned_ranges(), 0u);
  auto cpu_client = OpenClient(folder_.path());
  ASSERT_TRUE(cpu_client->WaitConnected(std::chrono::seconds(20)));
  WorkerOptions checked = PairOptions();
  checked.verify_every = 1;
  const auto cpu = Worker::Open(checked, cpu_client.get()).value();
  EXPECT_EQ(cpu->Begin(other.prompt(kPrompt), Patient()).value()->cached_tokens(), kHit);
  EXPECT_EQ(cpu->counters().verify_failures, 0u);
}

// crumbd is killed while a hit's pages are in flight, and another one takes its place.
TEST_P(DeviceCrumbdTest, KilledCrumbdCostsNoToken) {
  std::vector<float> expected;
  const auto worker = OpenDeviceWorker();
  DeviceRun prompts(device_, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
  DeviceRun decode(device_, *worker, {});
  {
    const auto cpu = Worker::Open(PairOptions(), client_.get()).value();
    const auto cold = cpu->Begin(model_.prompt(kPrompt)).value();
    PlayOnCpu(model_, *cold);
    ASSERT_TRUE(cold->Finish().ok());
    ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
    const auto warm = cpu->Begin(model_.prompt(kPrompt), Patient()).value();
    expected = PlayOnCpu(model_, *warm);
  }
  device_.HoldOthers();
  auto hit = worker->Begin(model_.prompt(kPrompt), Patient()).value();
  ASSERT_EQ(hit->cached_tokens(), kHit);
  crumbd_.Kill();
  EXPECT_LT(Worst(Play(prompts, decode, model_, *hit), expected), 2e-5);
  ASSERT_TRUE(decode.batch().Finish(*hit).ok());
  device_.ReleaseOthers();
  ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
  const WorkerCounters counters = worker->counters();
  EXPECT_EQ(counters.published_pages + counters.deduplicated_pages, 0u);
  EXPECT_GT(counters.publish_dropped_unavailable, 0u);

  const uint64_t epoch = client_->epoch();
  ASSERT_TRUE(crumbd_.Start());
  const TimePoint deadline = Clock::Real().Now() + kPatience;
  while (client_->epoch() == epoch || !client_->connected()) {
    ASSERT_LT(Clock::Real().Now(), deadline);
    std::this_thread::yield();
  }
  auto again = worker->Begin(model_.prompt(kPrompt), Patient()).value();
  EXPECT_LT(Worst(Play(prompts, decode, model_, *again), expected), 2e-5);
  ASSERT_TRUE(decode.batch().Finish(*again).ok());
  ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
  EXPECT_GT(worker->counters().published_pages + worker->counters().deduplicated_pages, 0u);
}

// Returns a rank's part of the whole model's outputs [layers, heads, head_dim] of one token.
std::vector<float> PartOf(const std::vector<float>& whole, const WorkerOptions& rank) {
  std::vector<float> part;
  const IndexRange layers = rank.own_tiles().layers, queries = rank.own_q_head_range();
  for (int layer = layers.begin; layer < layers.end; ++layer) {
    const auto row =
        whole.begin() + static_cast<std::ptrdiff_t>(layer) * rank.q_heads * rank.head_dim;
    part.insert(part.end(), row + queries.begin * rank.head_dim, row + queries.end * rank.head_dim);
  }
  return part;
}

// The ranks of an engine, each on a device of its own, attend pages of one process; the pages that
// they publish together can be read as whole pages again.
TEST_P(DeviceCrumbdTest, RanksLeadAndFollow) {
  for (const RankPlace size : {RankPlace{.tp_size = 2}, RankPlace{.pp_size = 2}}) {
    SCOPED_TRACE(size.tp_size);
    const SequenceModel model(PairOptions(), RandomTokens(kPrompt + 100, 60 + size.tp_size));
    std::vector<std::vector<float>> expected;
    {
      const auto cpu = Worker::Open(PairOptions(), client_.get()).value();
      const auto cold = cpu->Begin(model.prompt(900)).value();
      model.Pass(*cold, 900);
      ASSERT_TRUE(cold->Finish().ok());
      ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
      SequenceOptions silent = Patient();
      silent.publish = Publish::kNone;
      const auto warm = cpu->Begin(model.prompt(kPrompt), silent).value();
      ASSERT_EQ(warm->cached_tokens(), kHit);
      model.Pass(*warm, kPrompt);
      for (int i = 1; i <= 5; ++i) expected.push_back(model.Pass(*warm, kPrompt + i));
    }
    std::string token;
    for (int rank = 0; rank < 2; ++rank) {
      ClientOptions connection;
      connection.socket_dir = folder_.path();
      connection.engine = std::string(16, static_cast<char>('a' + size.tp_size));
      connection.staging_bytes = 8 << 20;
      const auto client = Client::Open(connection).value();
      ASSERT_TRUE(client->WaitConnected(std::chrono::seconds(20)));
      WorkerOptions options = PairOptions();
      options.part = PartOfRank({.tp_rank = size.tp_size > 1 ? rank : 0,
                                 .tp_size = size.tp_size,
                                 .pp_rank = size.pp_size > 1 ? rank : 0,
                                 .pp_size = size.pp_size},
                                options.layers, options.kv_heads, options.q_heads)
                         .value();
      SimulatedDevice device(GetParam() + rank);
      const auto worker = DeviceWorker::Open(options, InPieces(), client.get(), device).value();
      DeviceRun prompts(device, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
      DeviceRun decode(device, *worker, {});
      std::unique_ptr<DeviceSequence> sequence;
      if (rank == 0) {
        LedDeviceSequence led = worker->Lead(model.prompt(kPrompt), Patient()).value();
        token = led.token;
        sequence = std::move(led.sequence);
      } else {
        auto followed = worker->Follow(token, model.prompt(kPrompt), Patient());
        ASSERT_TRUE(followed.ok()) << followed.status();
        sequence = std::move(followed).value();
      }
      EXPECT_EQ(sequence->cached_tokens(), kHit);
      while (sequence->length() < kPrompt) {
        const int tokens = std::min(400, sequence->pass_tokens_max());
        prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
      }
      for (const std::vector<float>& whole : expected) {
        const auto pass = decode.Pass({{sequence.get(), &model, sequence->length() + 1, 1}});
        EXPECT_LT(Worst(pass->Outputs(0), PartOf(whole, options)), 2e-5) << "rank " << rank;
      }
      ASSERT_TRUE(decode.batch().Finish(*sequence).ok());
      ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
      EXPECT_EQ(worker->counters().published_pages, 3u);  // 14, 15 and 16
    }
    const auto cpu = Worker::Open(PairOptions(), client_.get()).value();
    EXPECT_EQ(cpu->Begin(std::span(model.tokens()).first(kPrompt + 100), Patient())
                  .value()
                  ->cached_tokens(),
              896);
  }
}

// Each rank's part of a page lies in a pool: both in one device's pool, or each in its own.
// Together they are a hit for the engine, and no rank copies.
TEST_P(DeviceCrumbdTest, RanksLeadAndFollowInPools) {
  for (const bool one_device : {true, false}) {
    SCOPED_TRACE(one_device);
    const SequenceModel model(PairOptions(), RandomTokens(kPrompt + 100, one_device ? 80 : 81));
    std::vector<std::vector<float>> expected;
    {
      MemoryClient store;
      const auto cpu = Worker::Open(PairOptions(), &store).value();
      const auto cold = cpu->Begin(model.prompt(kPrompt)).value();
      model.Pass(*cold, kPrompt);
      ASSERT_TRUE(cold->Finish().ok());
      ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
      const auto warm = cpu->Begin(model.prompt(kPrompt)).value();
      model.Pass(*warm, kPrompt);
      for (int i = 1; i <= 5; ++i) expected.push_back(model.Pass(*warm, kPrompt + i));
    }
    std::vector<std::unique_ptr<Client>> clients;
    std::vector<std::unique_ptr<SimulatedDevice>> devices;
    std::vector<std::unique_ptr<DeviceWorker>> workers;
    for (int rank = 0; rank < 2; ++rank) {
      ClientOptions connection;
      connection.socket_dir = folder_.path();
      connection.engine = std::string(16, one_device ? 'o' : 't');
      connection.staging_bytes = 8 << 20;
      clients.push_back(Client::Open(connection).value());
      ASSERT_TRUE(clients.back()->WaitConnected(std::chrono::seconds(20)));
      WorkerOptions options = PairOptions();
      options.part = PartOfRank({.tp_rank = rank, .tp_size = 2}, options.layers, options.kv_heads,
                                options.q_heads)
                         .value();
      devices.push_back(std::make_unique<SimulatedDevice>(
          GetParam() + rank, SIZE_MAX, one_device || rank == 0 ? "first" : "second"));
      DeviceWorkerOptions pools = Pooled();
      pools.pool_write_through = false;
      workers.push_back(
          DeviceWorker::Open(options, pools, clients.back().get(), *devices.back()).value());
      AwaitBlank(*workers.back());
    }
    for (const int cached : {0, kHit}) {
      std::string token;
      std::vector<std::unique_ptr<DeviceSequence>> sequences;
      for (int rank = 0; rank < 2; ++rank) {
        if (rank == 0) {
          LedDeviceSequence led = workers[0]->Lead(model.prompt(kPrompt), Patient()).value();
          token = led.token;
          sequences.push_back(std::move(led.sequence));
        } else {
          auto followed = workers[1]->Follow(token, model.prompt(kPrompt), Patient());
          ASSERT_TRUE(followed.ok()) << followed.status();
          sequences.push_back(std::move(followed).value());
        }
        const SequenceStats stats = sequences.back()->stats();
        EXPECT_EQ(stats.hit_tokens_device, cached) << "rank " << rank << " " << stats.miss_reason;
        EXPECT_EQ(stats.loaded_bytes, 0u);
      }
      for (int rank = 0; rank < 2; ++rank) {
        DeviceRun prompts(*devices[rank], *workers[rank],
                          {.kind = PassKind::kPrompt, .tokens = 400});
        DeviceRun decode(*devices[rank], *workers[rank], {});
        DeviceSequence& sequence = *sequences[rank];
        while (sequence.length() < kPrompt) {
          const int tokens = std::min(400, sequence.pass_tokens_max());
          prompts.Pass({{&sequence, &model, sequence.length() + tokens, tokens}});
        }
        for (const std::vector<float>& whole : expected) {
          const auto pass = decode.Pass({{&sequence, &model, sequence.length() + 1, 1}});
          if (cached == 0) continue;  // the CPU's pages were attended there
          EXPECT_LT(Worst(pass->Outputs(0), PartOf(whole, workers[rank]->options())), 2e-5)
              << "rank " << rank;
        }
        ASSERT_TRUE(decode.batch().Finish(sequence).ok());
        sequences[rank].reset();
        ASSERT_TRUE(workers[rank]->WaitPublished(kPatience).ok());
      }
    }
    workers.clear();
    for (const auto& device : devices) EXPECT_EQ(device->shared_ranges(), 0u);
  }
}

// On request, it fails Acquires of a lease that was granted before.
class ForgetfulClient final : public ForwardingClient {
 public:
  using ForwardingClient::ForwardingClient;

  std::unique_ptr<PendingAcquire> StartAcquire(const AcquireRequest& request) override {
    if (request.lease != 0) ++queries;
    if (request.lease == 0 || !forgets) return ForwardingClient::StartAcquire(request);
    return std::make_unique<Silence>();
  }

  std::atomic<bool> forgets{false};
  std::atomic<int> queries{0};

 private:
  class Silence final : public PendingAcquire {
   public:
    absl::StatusOr<AcquireResult> Finish() override {
      return absl::UnavailableError("crumbd is gone");
    }
  };
};

// The first layer of a peer's pages is copied before most of their checksums arrive. If these do
// not arrive, nothing is attended: the pass returns an error, and no damage is reported.
TEST_P(DeviceCrumbdTest, APeersPagesNeedTheirSums) {
  const std::vector<std::string> names = {"owner", "reader"};
  SimulatedDevice owner(GetParam(), SIZE_MAX, "owner", names);
  SimulatedDevice reader(GetParam() + 1, SIZE_MAX, "reader", names);
  const auto reading = OpenClient(folder_.path());
  ASSERT_TRUE(reading->WaitConnected(std::chrono::seconds(20)));
  ForgetfulClient forgetful(*reading);
  DeviceWorkerOptions pools = Pooled();
  pools.pool_write_through = false;
  {
    const auto writer = DeviceWorker::Open(PairOptions(), pools, client_.get(), owner).value();
    AwaitBlank(*writer);
    DeviceRun prompts(owner, *writer, {.kind = PassKind::kPrompt, .tokens = 400});
    DeviceRun decode(owner, *writer, {});
    const auto cold = writer->Begin(model_.prompt(kPrompt), Patient()).value();
    Play(prompts, decode, model_, *cold);
    ASSERT_TRUE(decode.batch().Finish(*cold).ok());
    ASSERT_TRUE(writer->WaitPublished(kPatience).ok());
  }
  pools.pool_peers = {0};
  const auto worker = DeviceWorker::Open(PairOptions(), pools, &forgetful, reader).value();
  AwaitBlank(*worker);
  DeviceRun prompts(reader, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
  const auto pass = [&](DeviceSequence& sequence) {
    const int tokens = std::min(400, sequence.pass_tokens_max());
    return prompts.TryPass({{&sequence, &model_, sequence.length() + tokens, tokens}}).status();
  };
  for (const bool forgets : {true, false}) {
    forgetful.forgets = forgets;
    std::unique_ptr<DeviceSequence> hit;
    // The peer's pools are joined in the background.
    ASSERT_TRUE(Eventually([&] {
      hit.reset();  // otherwise the next sequence would use its pages
      hit = worker->Begin(model_.prompt(kPrompt), Patient()).value();
      return hit->stats().hit_tokens_device == kHit;
    })) << hit->stats().miss_reason;
    EXPECT_GT(hit->stats().loaded_bytes, 0u);
    absl::Status status;
    while (status.ok() && hit->length() < kPrompt) status = pass(*hit);
    EXPECT_EQ(absl::IsDataLoss(status), forgets) << status;
    EXPECT_GT(forgetful.queries.exchange(0), 0);
    EXPECT_EQ(worker->counters().verify_failures, 0u);
    EXPECT_GT(worker->counters().unavailable, 0u);
    hit.reset();
    ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
  }
}

// An operator switches INT2 off: sequences on the device store BF16 pages, which both back ends
// hit. History pages go through crumbd's memory; sinks may still lie in a pool.
TEST_P(DeviceCrumbdTest, Bf16HistoryGoesThroughCrumbd) {
  KeyspaceSpec spec;
  spec.fields = KeyspaceFields(PairOptions(), kernels::PageFormat::kInt2).value();
  spec.layers = PairOptions().layers;
  spec.kv_heads = PairOptions().kv_heads;
  spec.head_dim = PairOptions().head_dim;
  spec.group_size = PairOptions().group_size;
  const KeyspaceId int2 = client_->OpenKeyspace(spec, kPatience).value().id;
  ASSERT_TRUE(client_->SetKeyspaceState(int2, KeyspaceState::kBf16, "test", "a test").ok());
  WorkerOptions bf16 = PairOptions();
  bf16.history_format = kernels::PageFormat::kBf16;
  for (const bool pooled : {false, true}) {
    SCOPED_TRACE(pooled);
    const SequenceModel model(PairOptions(), RandomTokens(kPrompt + 100, pooled ? 90 : 91));
    const auto alone = Worker::Open(bf16, nullptr).value();
    const auto cold = alone->Begin(model.prompt(kPrompt)).value();
    const std::vector<float> expected = PlayOnCpu(model, *cold);
    {
      const auto worker =
          DeviceWorker::Open(PairOptions(), pooled ? Pooled() : InPieces(), client_.get(), device_)
              .value();
      if (pooled) AwaitBlank(*worker);
      DeviceRun prompts(device_, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
      DeviceRun decode(device_, *worker, {});
      for (const int cached : {0, kHit}) {
        const auto sequence = worker->Begin(model.prompt(kPrompt), Patient()).value();
        EXPECT_EQ(sequence->cached_tokens(), cached) << sequence->stats().miss_reason;
        EXPECT_EQ(sequence->stats().hit_tokens_device, pooled && cached > 0 ? 64 : 0);
        EXPECT_LT(Worst(Play(prompts, decode, model, *sequence), expected), 2e-5);
        EXPECT_EQ(sequence->stats().bits_per_element(), 16.0);
        ASSERT_TRUE(decode.batch().Finish(*sequence).ok());
        ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
      }
      EXPECT_EQ(worker->counters().publish_refused, 0u);
      EXPECT_EQ(worker->counters().verify_failures, 0u);
    }
    const auto cpu = Worker::Open(PairOptions(), client_.get()).value();
    const auto hit = cpu->Begin(model.prompt(kPrompt), Patient()).value();
    EXPECT_EQ(hit->cached_tokens(), kHit);
    EXPECT_LT(Worst(PlayOnCpu(model, *hit), expected), 2e-5);
    EXPECT_EQ(cpu->counters().verify_failures, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceCrumbdTest, testing::Range(0u, 3u));

TEST(ArenaPinnerTest, PinsEachConnectionOnceAndInPieces) {
  TemporaryFolder folder;
  fault::CrumbdProcess crumbd(folder.path(), {});
  ASSERT_TRUE(crumbd.Start());
  SimulatedDevice device(0);
  const auto client = OpenClient(folder.path());
  ASSERT_TRUE(client->WaitConnected(std::chrono::seconds(20)));
  constexpr size_t kPiece = 4 << 20;
  {
    ArenaPinner pinner(device, client.get(), kPiece);
    std::shared_ptr<const PinnedArena> arena = pinner.Use();
    ASSERT_TRUE(pinner.WaitIdle(kPatience).ok());
    ASSERT_NE(arena->memory(), nullptr);
    size_t bytes = arena->memory()->staging.size();
    for (const auto& slab : arena->memory()->slabs) bytes += slab.size();
    size_t pinned = 0;
    for (const auto range : arena->Pinned()) pinned += range.size();
    EXPECT_EQ(pinned, bytes);
    EXPECT_EQ(device.pinned_ranges(), (bytes + kPiece - 1) / kPiece);
    EXPECT_EQ(pinner.Use(), arena);

    const auto base = reinterpret_cast<uint64_t>(arena->memory()->staging.data());
    const DeviceCopy crossing{base + kPiece - 100, 1000, 300};
    const auto cut = arena->CutToHost({&crossing, 1});
    ASSERT_EQ(cut.size(), 2u);
    EXPECT_EQ(cut[0].bytes, 100u);
    EXPECT_EQ(cut[1].to, base + kPiece);
    EXPECT_EQ(cut[1].from, 1100u);
    EXPECT_EQ(cut[1].bytes, 200u);
    EXPECT_EQ(arena->CutToDevice({&crossing, 1}).size(), 1u);  // its host side is elsewhere
  }
  EXPECT_EQ(device.pinned_ranges(), 0u);
}

}  // namespace
}  // namespace crumb::client
