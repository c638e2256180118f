// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of GPU workers that use common pools with a real crumbd, in processes that are killed:
// pages evicted by one are attended in place by another, and outputs are compared with the CPU
// worker's.

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>

#include "crumb/client.h"
#include "crumb/device_worker.h"
#include "crumb/worker.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/counting_device.h"
#include "tests/client/gpu/device_run.h"
#include "tests/client/gpu/pools/pool_player.h"
#include "tests/client/gpu/process_use.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"

namespace crumb::client {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr int kPrompt = 1100;
constexpr int kHit = 832;

class DevicePoolsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (Platform().open(0) == nullptr) GTEST_SKIP() << "needs a CUDA device";
    ASSERT_TRUE(crumbd_.Start());
    watcher_ = OpenClient();
  }

  PlayerOptions Options() const {
    PlayerOptions options;
    options.socket_dir = folder_.path();
    return options;
  }
  std::unique_ptr<Client> OpenClient() const {
    ClientOptions options;
    options.socket_dir = folder_.path();
    options.staging_bytes = 8 << 20;
    options.backoff_min = std::chrono::milliseconds(5);
    options.backoff_max = std::chrono::milliseconds(50);
    auto client = Client::Open(options).value();
    EXPECT_TRUE(client->WaitConnected(std::chrono::seconds(20)));
    return client;
  }

  CacheStats::TierStats Device() {
    const auto stats = watcher_->Stats();
    if (!stats.ok()) return {};
    for (const auto& tier : stats->tiers) {
      if (tier.tier == Tier::kDevice) return tier;
    }
    return {};
  }
  uint64_t Counter(const std::string& name) {
    const auto stats = watcher_->Stats();
    return stats.ok() && stats->counters.contains(name) ? stats->counters.at(name) : 0;
  }

  // Decodes `tokens` behind the prompt and compares the outputs with the CPU worker's, which hit
  // the prefix or computed it.
  void ExpectRight(PoolPlayer& player, uint32_t seed, int tokens, bool hit) {
    ASSERT_EQ(player.Do("play " + std::to_string(seed) + " " + std::to_string(tokens)), "ok");
    const double error = RelativeError(player.OutputsOf(seed), Expected(seed, tokens, hit));
    EXPECT_LE(error, Platform().error_max) << "sequence " << seed;
  }
  // Does the same for a sequence whose prompt has been played: the next `tokens`.
  void ExpectGoesOn(PoolPlayer& player, uint32_t seed, int played, int tokens, bool hit) {
    ASSERT_EQ(player.Do("play " + std::to_string(seed) + " " + std::to_string(tokens)), "ok");
    std::vector<float> expected = Expected(seed, played + tokens, hit);
    const size_t token = expected.size() / static_cast<size_t>(played + tokens);
    expected.erase(expected.begin(),
                   expected.begin() + static_cast<std::ptrdiff_t>(token * played));
    EXPECT_LE(RelativeError(player.OutputsOf(seed), expected), Platform().error_max);
  }

  // Begins sequence S, of which no pages are cached, plays and publishes it.
  void PlayCold(PoolPlayer& player, uint32_t seed, int tokens) {
    const std::string begun = player.Do(Line("begin", seed, kPrompt));
    ASSERT_EQ(begun, "cached 0 device 0 host 0 loaded 0");
    ExpectRight(player, seed, tokens, false);
  }

  static std::string Line(const char* verb, uint32_t seed, int count) {
    return std::string(verb) + " " + std::to_string(seed) + " " + std::to_string(count);
  }

  static std::vector<float> Expected(uint32_t seed, int tokens, bool hit, int cached = kHit) {
    const WorkerOptions& options = Platform().options;
    const SequenceModel model(options, PlayerTokens(seed));
    MemoryClient store;
    const auto worker = Worker::Open(options, hit ? &store : nullptr).value();
    if (hit) {
      const auto cold = worker->Begin(model.prompt(kPrompt)).value();
      model.Pass(*cold, kPrompt);
      EXPECT_TRUE(cold->Finish().ok());
      EXPECT_TRUE(worker->WaitPublished(kPatience).ok());
    }
    SequenceOptions begin;
    begin.cached_tokens_max = cached;
    const auto sequence = worker->Begin(model.prompt(kPrompt), begin).value();
    EXPECT_EQ(sequence->cached_tokens(), hit ? cached : 0);
    model.Pass(*sequence, kPrompt);
    std::vector<float> outputs;
    for (int i = 1; i <= tokens; ++i) {
      const std::vector<float> out = model.Pass(*sequence, kPrompt + i);
      outputs.insert(outputs.end(), out.begin(), out.end());
    }
    return outputs;
  }

  static constexpr const char* kWholeHit = "cached 832 device 832 host 0 loaded 0";

  TemporaryFolder folder_;
  fault::CrumbdProcess crumbd_{folder_.path(), {}};
  std::unique_ptr<Client> watcher_;
};

TEST_F(DevicePoolsTest, OthersAttendInPlaceAndOutliveTheWriter) {
  PoolPlayer writer(Options());
  PoolPlayer reader(Options());
  ASSERT_EQ(writer.Do("joined"), "ok");
  ASSERT_EQ(reader.Do("joined"), "ok");
  PlayCold(writer, 1, 70);
  ASSERT_EQ(writer.Do("published"), "ok");
  EXPECT_GE(NumberIn(writer.Do("counters"), "pool"), kHit / 64);
  EXPECT_EQ(NumberIn(writer.Do("counters"), "published"), 0);  // nothing was copied
  EXPECT_EQ(NumberIn(writer.Do("pool"), "out"), 0);

  ASSERT_EQ(reader.Do(Line("begin", 1, kPrompt)), kWholeHit);
  ExpectRight(reader, 1, 10, true);
  ExpectGoesOn(writer, 1, 70, 10, false);
  writer.Kill();
  ExpectGoesOn(reader, 1, 10, 100, true);

  // The next player finds the pool, and the pages that the dead one left.
  PoolPlayer next(Options());
  ASSERT_EQ(next.Do("joined"), "ok");
  ASSERT_EQ(next.Do(Line("begin", 1, kPrompt)), kWholeHit);
  ExpectRight(next, 1, 10, true);
  EXPECT_EQ(next.Stop(), 0);
  EXPECT_EQ(reader.Stop(), 0);
  // Without players, all slots are pages or free, including blank and uncommitted slots of the dead
  // one.
  EXPECT_TRUE(Eventually([&] {
    return Counter("crumb_device_dropped_slots_total") == 0 && Device().pages > 0 &&
           watcher_->Stats()->sessions == 1;
  }));
  PoolPlayer last(Options());
  ASSERT_EQ(last.Do("joined"), "ok");
  EXPECT_EQ(last.Do(Line("begin", 1, kPrompt)), kWholeHit);
  ExpectRight(last, 1, 3, true);
  EXPECT_EQ(last.Stop(), 0);
}

TEST_F(DevicePoolsTest, PagesOfHostMemoryAreLoadedOnceForAll) {
  const SequenceModel model(Platform().options, PlayerTokens(2));
  {
    const auto client = OpenClient();
    const auto cpu = Worker::Open(Platform().options, client.get()).value();
    const auto cold = cpu->Begin(model.prompt(kPrompt)).value();
    model.Pass(*cold, kPrompt);
    ASSERT_TRUE(cold->Finish().ok());
    ASSERT_TRUE(cpu->WaitPublished(kPatience).ok());
  }
  PoolPlayer loads(Options());
  PoolPlayer attends(Options());
  ASSERT_EQ(loads.Do("joined"), "ok");
  ASSERT_EQ(attends.Do("joined"), "ok");
  const std::string first = loads.Do(Line("begin", 2, kPrompt));
  EXPECT_EQ(NumberIn(first, "host"), kHit) << first;
  EXPECT_GT(NumberIn(first, "loaded"), 0) << first;
  ExpectRight(loads, 2, 5, true);
  ASSERT_EQ(loads.Do("published"), "ok");
  ASSERT_EQ(attends.Do(Line("begin", 2, kPrompt)), kWholeHit);
  ExpectRight(attends, 2, 5, true);
  EXPECT_EQ(loads.Stop(), 0);
  EXPECT_EQ(attends.Stop(), 0);
}

TEST_F(DevicePoolsTest, PagesAreCopiedToCrumbdAtOnceWhenRequested) {
  PlayerOptions options = Options();
  options.write_through = true;
  PoolPlayer writer(options);
  ASSERT_EQ(writer.Do("joined"), "ok");
  PlayCold(writer, 3, 5);
  ASSERT_EQ(writer.Do("finish 3"), "ok");
  ASSERT_EQ(writer.Do("published"), "ok");
  const std::string counters = writer.Do("counters");
  EXPECT_EQ(NumberIn(counters, "pool"), kPrompt / 64) << counters;
  EXPECT_EQ(NumberIn(counters, "published"), kPrompt / 64) << counters;
  // A worker without a device gets them from host memory.
  const SequenceModel model(Platform().options, PlayerTokens(3));
  const auto cpu = Worker::Open(Platform().options, watcher_.get()).value();
  const auto hit = cpu->Begin(model.prompt(kPrompt)).value();
  EXPECT_EQ(hit->stats().hit_tokens_host, kHit);
  EXPECT_EQ(writer.Stop(), 0);
}

// In a pool of one handle, pages that are not held move to host memory when their slots are needed.
TEST_F(DevicePoolsTest, PagesMoveDownOnRequest) {
  PlayerOptions options = Options();
  options.pool_bytes = 2 << 20;
  PoolPlayer player(options);
  ASSERT_EQ(player.Do("joined"), "ok");
  constexpr uint32_t kSequences = 16;
  for (uint32_t seed = 10; seed < 10 + kSequences; ++seed) {
    PlayCold(player, seed, 1);
    ASSERT_EQ(player.Do("finish " + std::to_string(seed)), "ok");
    ASSERT_EQ(player.Do("published"), "ok");
  }
  ASSERT_TRUE(Eventually([&] { return NumberIn(player.Do("pool"), "demoted") > 0; }));
  EXPECT_EQ(NumberIn(player.Do("pool"), "failed"), 0);
  EXPECT_EQ(Counter("crumb_device_dropped_slots_total"), 0u);
  int64_t host = 0, device = 0;
  // The latest sequences first, because loaded pages take the slots of the others.
  for (uint32_t seed = 10 + kSequences; seed-- > 10;) {
    const std::string begun = player.Do(Line("begin", seed, kPrompt));
    EXPECT_EQ(NumberIn(begun, "cached"), kHit) << begun;
    host += NumberIn(begun, "host");
    device += NumberIn(begun, "device");
    ExpectRight(player, seed, 1, true);
    ASSERT_EQ(player.Do("drop " + std::to_string(seed)), "ok");
  }
  EXPECT_GT(host, 0);
  EXPECT_GT(device, 0);
  EXPECT_EQ(NumberIn(player.Do("counters"), "verify"), 0);
  EXPECT_EQ(player.Stop(), 0);
}

// If more pages are in use than the pool has slots, the others are private, and no call blocks.
TEST_F(DevicePoolsTest, WithoutBlankSlotsPagesArePrivate) {
  PlayerOptions options = Options();
  options.pool_bytes = 2 << 20;
  options.private_pages = 256;
  PoolPlayer player(options);
  ASSERT_EQ(player.Do("joined"), "ok");
  ASSERT_EQ(player.Do(Line("begin", 30, 2500)), "cached 0 device 0 host 0 loaded 0");
  for (uint32_t seed = 31; seed < 38; ++seed) PlayCold(player, seed, 2);
  ASSERT_EQ(player.Do("play 30 1"), "ok");
  for (uint32_t seed = 31; seed < 38; ++seed) ExpectGoesOn(player, seed, 2, 3, false);
  EXPECT_EQ(player.Stop(), 0);
}

TEST_F(DevicePoolsTest, CrumbdIsKilledAndKnowsWhatIsHeldAgain) {
  PoolPlayer holder(Options());
  ASSERT_EQ(holder.Do("joined"), "ok");
  PlayCold(holder, 4, 5);
  ASSERT_EQ(holder.Do("published"), "ok");
  crumbd_.Kill();
  ExpectGoesOn(holder, 4, 5, 70, false);
  ASSERT_TRUE(crumbd_.Start());
  ASSERT_TRUE(Eventually([&] { return NumberIn(holder.Do("pool"), "reclaimed") >= kHit / 64; }));
  ASSERT_EQ(holder.Do("joined"), "ok");
  // The next sequence that begins opens its keyspace again.
  PoolPlayer other(Options());
  ASSERT_EQ(other.Do("joined"), "ok");
  ExpectGoesOn(holder, 4, 75, 5, false);
  ASSERT_EQ(other.Do(Line("begin", 5, kPrompt)), "cached 0 device 0 host 0 loaded 0");
  ExpectRight(other, 5, 2, false);
  EXPECT_EQ(holder.Stop(), 0);
  EXPECT_EQ(other.Stop(), 0);
}

// Another crumbd takes over with the host memory; workers restore the device pools.
TEST_F(DevicePoolsTest, PoolsOutliveATakeover) {
  PoolPlayer holder(Options());
  ASSERT_EQ(holder.Do("joined"), "ok");
  PlayCold(holder, 6, 5);
  ASSERT_EQ(holder.Do("published"), "ok");
  for (int round = 0; round < 2; ++round) {
    const pid_t successor = crumbd_.StartSuccessor();
    ASSERT_GT(successor, 0);
    int status = 0;
    ASSERT_EQ(::waitpid(crumbd_.pid(), &status, 0), crumbd_.pid());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    crumbd_.Follow(successor);
    ASSERT_TRUE(crumbd_.WaitServing());
    ExpectGoesOn(holder, 6, 5 + 10 * round, 10, false);
    const int64_t expected = (round + 1) * (kHit / 64);
    ASSERT_TRUE(Eventually([&] { return NumberIn(holder.Do("pool"), "reclaimed") >= expected; }))
        << holder.Do("pool");
    ASSERT_EQ(holder.Do("joined"), "ok");
    PoolPlayer other(Options());
    ASSERT_EQ(other.Do("joined"), "ok");
    ASSERT_EQ(other.Do(Line("begin", 6, kPrompt)), kWholeHit) << "round " << round;
    ExpectRight(other, 6, 5, true);
    EXPECT_EQ(other.Stop(), 0);
  }
  EXPECT_EQ(holder.Stop(), 0);
}

TEST_F(DevicePoolsTest, PeersAreCopiedFromAndVerified) {
  if (Platform().open(1) == nullptr) GTEST_SKIP() << "needs two CUDA devices";
  PoolPlayer writer(Options());
  ASSERT_EQ(writer.Do("joined"), "ok");
  PlayCold(writer, 7, 5);
  ASSERT_EQ(writer.Do("published"), "ok");
  PlayerOptions options = Options();
  options.device = 1;
  options.peer = 0;
  PoolPlayer reader(options);
  ASSERT_EQ(reader.Do("joined"), "ok");
  std::string begun;
  // The peer's pools are joined in the background.
  ASSERT_TRUE(Eventually([&] {
    begun = reader.Do(Line("begin", 7, kPrompt));
    return NumberIn(begun, "device") == kHit;
  })) << begun;
  EXPECT_GT(NumberIn(begun, "loaded"), 0) << begun;
  ExpectRight(reader, 7, 5, true);
  EXPECT_EQ(NumberIn(reader.Do("counters"), "verify"), 0);
  ASSERT_EQ(reader.Do("published"), "ok");
  // The pages are on the reader's device now, so that the next hit there copies nothing.
  PoolPlayer beside(options);
  ASSERT_EQ(beside.Do("joined"), "ok");
  EXPECT_EQ(beside.Do(Line("begin", 7, kPrompt)), kWholeHit);
  ExpectRight(beside, 7, 5, true);
  // The writer's death affects no process that reads its memory.
  writer.Kill();
  ExpectGoesOn(reader, 7, 5, 20, true);
  EXPECT_EQ(reader.Stop(), 0);
  EXPECT_EQ(beside.Stop(), 0);
}

// A page of another process in the pool changes in device memory. A process that attends it detects
// that by crumbd's checksums, and crumbd gives the page to no process any more.
TEST_F(DevicePoolsTest, ADamagedPageIsFoundAndGivenToNoProcess) {
  constexpr int kDamaged = 4, kRest = kDamaged * 64;
  PoolPlayer writer(Options());
  PlayerOptions options = Options();
  options.scrub = 500;
  PoolPlayer reader(options);
  ASSERT_EQ(writer.Do("joined"), "ok");
  ASSERT_EQ(reader.Do("joined"), "ok");
  PlayCold(writer, 8, 5);
  ASSERT_EQ(writer.Do("published"), "ok");
  ASSERT_EQ(reader.Do(Line("begin", 8, kPrompt)), kWholeHit);
  ExpectRight(reader, 8, 5, true);
  // The checksums of all attended pages are verified, and match.
  ASSERT_TRUE(Eventually([&] { return NumberIn(reader.Do("counters"), "scrubbed") > 60; }));
  EXPECT_EQ(NumberIn(reader.Do("counters"), "verify"), 0);
  const uint64_t pages = Device().pages;
  ASSERT_EQ(reader.Do(Line("flip", 8, kDamaged)), "ok");
  ASSERT_TRUE(Eventually([&] { return NumberIn(reader.Do("counters"), "verify") == 1; }));
  EXPECT_TRUE(Eventually([&] { return Device().pages == pages - 1; }));
  const std::string played = reader.Do("play 8 1");
  EXPECT_NE(played.find("DATA_LOSS"), std::string::npos) << played;
  EXPECT_NE(played.find("token " + std::to_string(kRest)), std::string::npos) << played;
  ASSERT_EQ(reader.Do("drop 8"), "ok");

  const std::string rest =
      "cached " + std::to_string(kRest) + " device " + std::to_string(kRest) + " host 0 loaded 0";
  PoolPlayer next(Options());
  ASSERT_EQ(next.Do("joined"), "ok");
  ASSERT_EQ(next.Do(Line("begin", 8, kPrompt)), rest);
  ASSERT_EQ(next.Do("play 8 3"), "ok");
  EXPECT_LE(RelativeError(next.OutputsOf(8), Expected(8, 3, true, kRest)), Platform().error_max);
  // An undamaged page replaces it.
  ASSERT_EQ(next.Do("finish 8"), "ok");
  ASSERT_EQ(next.Do("published"), "ok");
  ASSERT_EQ(reader.Do(Line("begin", 8, kPrompt)), kWholeHit);
  ASSERT_EQ(reader.Do("play 8 3"), "ok");
  EXPECT_EQ(NumberIn(reader.Do("counters"), "verify"), 1);
  EXPECT_TRUE(Eventually([&] { return Counter("crumb_scrubbed_pages_total") > 60; }));
  EXPECT_EQ(next.Stop(), 0);
  EXPECT_EQ(reader.Stop(), 0);
  EXPECT_EQ(writer.Stop(), 0);
}

// Workers open, hit, decode, evict, publish and close, while others are killed: no descriptor,
// mapping, pinned byte or device memory remains.
TEST_F(DevicePoolsTest, NothingIsLeftInAProcessThatOpensAndCloses) {
  const auto device = std::make_shared<CountingDevice>(Platform().open(0));
  const auto round = [&](uint32_t seed) {
    const auto client = OpenClient();
    DeviceWorkerOptions on_device;
    on_device.pages = 64;
    on_device.sequences = 8;
    on_device.load_pages = 64;
    on_device.pool_bytes = on_device.pool_sink_bytes = 8 << 20;
    on_device.pool_handle_bytes = 2 << 20;
    on_device.pool_blank_pages = 60;
    on_device.pool_blank_sinks = 4;
    on_device.pin_piece_bytes = 2 << 20;
    const auto worker =
        DeviceWorker::Open(Platform().options, on_device, client.get(), *device).value();
    ASSERT_TRUE(Eventually([&] {
      const DevicePoolUse use = worker->pool_use();
      return use.joined && use.blank_slots == 64;
    }));
    DeviceRun prompts(*device, *worker, {.kind = PassKind::kPrompt, .tokens = 400});
    DeviceRun decode(*device, *worker, {});
    PoolPlayer other(Options());
    ASSERT_EQ(other.Do("joined"), "ok");
    const SequenceModel model(Platform().options, PlayerTokens(seed));
    for (const int cached : {0, kHit}) {
      const auto sequence = worker->Begin(model.prompt(kPrompt)).value();
      EXPECT_EQ(sequence->cached_tokens(), cached);
      while (sequence->length() < kPrompt) {
        const int tokens = std::min(400, sequence->pass_tokens_max());
        prompts.Pass({{sequence.get(), &model, sequence->length() + tokens, tokens}});
      }
      for (int i = 0; i < 70; ++i) {
        decode.Pass({{sequence.get(), &model, sequence->length() + 1, 1}});
      }
      ASSERT_TRUE(decode.batch().Finish(*sequence).ok());
      ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
      if (cached == 0) {
        ASSERT_EQ(other.Do(Line("begin", seed, kPrompt)), kWholeHit);
        ASSERT_EQ(other.Do("play " + std::to_string(seed) + " 2"), "ok");
      }
    }
    ASSERT_EQ(other.Do(Line("begin", seed + 100, kPrompt)), "cached 0 device 0 host 0 loaded 0");
    other.Kill();
  };
  const auto free_bytes = [] {
    return Platform().free_bytes == nullptr ? 0 : Platform().free_bytes();
  };
  // Objects that a process keeps for good, such as modules and threads' stacks, exist after two
  // rounds.
  for (uint32_t i = 0; i < 2; ++i) round(60 + i);
  const CountingDevice::Live live = device->live();
  const ProcessUse before = UseOfThisProcess();
  const uint64_t free_before = free_bytes();
  EXPECT_EQ(live, CountingDevice::Live()) << live.ToString();
  EXPECT_GT(device->pinned_ever(), 0u);
  for (uint32_t i = 2; i < 5; ++i) round(60 + i);
  EXPECT_EQ(device->live(), live) << device->live().ToString();
  // gRPC closes its descriptors in the background.
  ProcessUse after;
  EXPECT_TRUE(Eventually([&] {
    after = UseOfThisProcess();
    return after.fds <= before.fds && after.mappings == before.mappings;
  }));
  EXPECT_LE(after.fds, before.fds);
  EXPECT_EQ(after.mappings, before.mappings);
  EXPECT_EQ(after.locked_kb, before.locked_kb);
  EXPECT_EQ(after.pinned_kb, before.pinned_kb);
  // A pool's address range is 1 TiB; a thread's stack or an allocator's arena is 64 MiB.
  EXPECT_LT(after.mapped_kb, before.mapped_kb + (uint64_t{2} << 20));
  // The driver releases memory of a killed process with some delay.
  EXPECT_TRUE(Eventually([&] { return free_bytes() >= free_before; }))
      << "of device memory " << free_before << " bytes were free, " << free_bytes() << " are now";
}

TEST_F(DevicePoolsTest, NothingIsLeftOfPlayersThatCameAndWent) {
  // Excludes the files of its SSD folder, whose number grows with the pages.
  const auto fds_of_crumbd = [&] {
    size_t count = 0;
    for (const auto& entry :
         std::filesystem::directory_iterator("/proc/" + std::to_string(crumbd_.pid()) + "/fd")) {
      std::error_code closed_meanwhile;
      const auto file = std::filesystem::read_symlink(entry.path(), closed_meanwhile).string();
      if (!closed_meanwhile && !file.starts_with(crumbd_.ssd_path())) ++count;
    }
    return count;
  };
  size_t after_first = 0;
  for (uint32_t round = 0; round < 4; ++round) {
    {
      PoolPlayer player(Options());
      ASSERT_EQ(player.Do("joined"), "ok");
      PlayCold(player, 40 + round, 2);
      if (round % 2 == 1) {
        ASSERT_EQ(player.Do("finish " + std::to_string(40 + round)), "ok");
        EXPECT_EQ(player.Stop(), 0);
      } else {
        // Not killed before it has published anything.
        ASSERT_TRUE(Eventually([&] { return Device().pages > 0; }));
      }
    }
    ASSERT_TRUE(Eventually([&] {
      const auto stats = watcher_->Stats();
      return stats.ok() && stats->sessions == 1 && stats->leases == 0;
    }));
    EXPECT_GT(Device().pages, 0u) << "pages outlive the process that published them";
    // The pools stay, with all their handles and rosters.
    if (round == 0) after_first = fds_of_crumbd();
    EXPECT_TRUE(Eventually([&] { return fds_of_crumbd() <= after_first; })) << "round " << round;
  }
}

}  // namespace
}  // namespace crumb::client

int main(int argc, char** argv) {
  const int player = crumb::client::RunPoolPlayer(argc, argv);
  if (player >= 0) return player;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
