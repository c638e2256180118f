// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of workers in processes of their own around a real crumbd. A worker is this program with a
// role as its argument.

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include "common/hex.h"
#include "crumb/client.h"
#include "crumb/worker.h"
#include "gtest/gtest.h"
#include "tests/client/sequence_model.h"
#include "tests/client/worker/rank_run.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"

extern char** environ;

namespace crumb::client {
namespace {

using std::chrono::seconds;

constexpr int kPrompt = 1100;
constexpr int kPages = 17;  // number of full pages of the prompt
constexpr int kHit = 832;   // maximum number of tokens of a hit
constexpr int kDecodeSteps = 5;

SequenceModel Model() {
  return SequenceModel(SmallWorkerOptions(), RandomTokens(kPrompt + 100, 42));
}

std::unique_ptr<Client> OpenClient(const std::string& dir, const std::string& engine = "") {
  ClientOptions options;
  options.engine = engine;
  options.socket_dir = dir;
  options.staging_bytes = 8 << 20;
  options.backoff_min = std::chrono::milliseconds(10);
  options.backoff_max = std::chrono::milliseconds(100);
  return Client::Open(options).value();
}

std::vector<float> Decode(const SequenceModel& model, Sequence& sequence) {
  if (sequence.length() < kPrompt) model.Pass(sequence, kPrompt);
  std::vector<float> outputs;
  for (int i = 0; i < kDecodeSteps; ++i) {
    const auto out = model.Pass(sequence, sequence.length() + 1);
    outputs.insert(outputs.end(), out.begin(), out.end());
  }
  return outputs;
}

std::vector<float> ColdOutputs(const SequenceModel& model) {
  const auto worker = Worker::Open(SmallWorkerOptions(), nullptr).value();
  return Decode(model, *worker->Begin(model.prompt(kPrompt)).value());
}

// Reads the prompt and publishes its pages.
bool PublishPrompt(Worker& worker, const SequenceModel& model) {
  const auto sequence = worker.Begin(model.prompt(kPrompt)).value();
  model.Pass(*sequence, kPrompt);
  return sequence->Finish().ok() && worker.WaitPublished(seconds(30)).ok();
}

SequenceOptions Patient() {
  SequenceOptions options;
  options.deadline = seconds(20);
  return options;
}

// Writes the pages; with `linger`, holds a lease and reservations until it is killed.
int RunWriter(const std::string& dir, bool linger) {
  const SequenceModel model = Model();
  const auto client = OpenClient(dir);
  const auto worker = Worker::Open(SmallWorkerOptions(), client.get()).value();
  if (!PublishPrompt(*worker, model)) return 1;
  if (worker->counters().published_pages != kPages) return 2;
  if (!client->Flush(seconds(20)).ok()) return 3;
  if (!linger) return 0;
  const auto sequence = worker->Begin(model.prompt(kPrompt), Patient()).value();
  const auto slots = client->Reserve(3, 5000, seconds(5));
  if (sequence->cached_tokens() != kHit || !slots.ok() || slots->size() != 3) return 4;
  std::cout << 'r' << std::flush;  // stdout is a pipe
  while (true) ::pause();
}

// Hits pages of another process, and checks that the outputs are those of a cold run.
int RunReader(const std::string& dir, const std::string& tier) {
  const SequenceModel model = Model();
  const auto client = OpenClient(dir);
  WorkerOptions options = SmallWorkerOptions();
  options.verify_every = 1;
  const auto worker = Worker::Open(options, client.get()).value();
  const auto sequence = worker->Begin(model.prompt(kPrompt), Patient()).value();
  const SequenceStats stats = sequence->stats();
  std::cerr << "hit " << stats.hit_tokens_host << " host, " << stats.hit_tokens_ssd << " ssd, then "
            << stats.miss_reason << "\n";
  if (sequence->cached_tokens() != kHit) return 1;
  if ((tier == "host" ? stats.hit_tokens_host : stats.hit_tokens_ssd) != kHit) return 2;
  return Decode(model, *sequence) == ColdOutputs(model) ? 0 : 3;
}

// Follows the token and waits to be killed.
int RunFollower(const std::string& dir, const std::string& token) {
  const SequenceModel model = Model();
  const auto client = OpenClient(dir, std::string(16, 'e'));
  WorkerOptions options = SmallWorkerOptions();
  options.part = PartOfRank({.tp_rank = 1, .tp_size = 2, .pp_rank = 0, .pp_size = 1},
                            options.layers, options.kv_heads, options.q_heads)
                     .value();
  const auto worker = Worker::Open(options, client.get()).value();
  std::string bytes(token.size() / 2, '\0');
  HexDecode(token, std::span(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()));
  const auto sequence = worker->Follow(bytes, model.prompt(kPrompt), Patient());
  if (!sequence.ok() || (*sequence)->cached_tokens() != kHit) return 1;
  std::cout << 'r' << std::flush;  // stdout is a pipe
  while (true) ::pause();
}

// This program in a role; its stdout is a pipe.
class RoleProcess {
 public:
  RoleProcess(const std::string& role, const std::string& dir, const std::string& detail = "") {
    int pipe[2];
    EXPECT_EQ(::pipe(pipe), 0);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, pipe[1], 1);
    const char* arguments[] = {"/proc/self/exe", role.c_str(), dir.c_str(), detail.c_str(),
                               nullptr};
    EXPECT_EQ(::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr,
                            const_cast<char**>(arguments), environ),
              0);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(pipe[1]);
    output_ = pipe[0];
  }
  ~RoleProcess() {
    Kill();
    ::close(output_);
  }

  bool WaitReady() const {
    char ready = 0;
    return ::read(output_, &ready, 1) == 1 && ready == 'r';
  }
  // Returns the exit code; -1 if a signal ended it.
  int Wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void Kill() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    Wait();
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

class CrumbdIntegrationTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(crumbd_.Start()); }
  const std::string& dir() const { return crumbd_.socket_dir(); }

  TemporaryFolder folder_;
  fault::CrumbdProcess crumbd_{folder_.path(), {}};
};

TEST_F(CrumbdIntegrationTest, TwoProcessesSharePagesInSharedMemory) {
  EXPECT_EQ(RoleProcess("write", dir()).Wait(), 0);
  EXPECT_EQ(RoleProcess("read", dir(), "host").Wait(), 0);
}

TEST_F(CrumbdIntegrationTest, AKilledWriterLeavesItsPagesAndNothingElse) {
  RoleProcess writer("linger", dir());
  ASSERT_TRUE(writer.WaitReady());
  const auto client = OpenClient(dir());
  EXPECT_GE(client->Stats()->leases, 1);
  EXPECT_EQ(client->Stats()->reservations, 3);
  writer.Kill();
  EXPECT_TRUE(Eventually([&] {
    const auto stats = client->Stats();
    return stats.ok() && stats->leases == 0 && stats->reservations == 0 && stats->sessions == 1;
  }));
  EXPECT_EQ(RoleProcess("read", dir(), "host").Wait(), 0);
}

// The ranks of an engine, each with a client of its own.
class EngineOfRanks {
 public:
  EngineOfRanks(const std::string& dir, Degree degree, const std::string& engine) {
    std::vector<Client*> clients;
    for (int rank = 0; rank < degree.tp * degree.pp; ++rank) {
      clients_.push_back(OpenClient(dir, engine));
      clients.push_back(clients_.back().get());
    }
    run_ = std::make_unique<RankRun>(SmallWorkerOptions(), degree, clients);
  }
  RankRun& run() { return *run_; }

 private:
  std::vector<std::unique_ptr<Client>> clients_;
  std::unique_ptr<RankRun> run_;
};

TEST_F(CrumbdIntegrationTest, EnginesOfEveryDegreeShareOneCopy) {
  const SequenceModel model = Model();
  RankRun alone(SmallWorkerOptions(), {}, {nullptr});
  const std::vector<float> expected =
      alone.Run(model, alone.Begin(model, kPrompt), kPrompt, kDecodeSteps).values;
  const auto watcher = OpenClient(dir());
  char name = 'a';
  for (const Degree written : {Degree{1, 1}, {2, 1}, {1, 2}, {4, 2}}) {
    EngineOfRanks writer(dir(), written, std::string(16, name++));
    writer.run().Publish(model, kPrompt);
    for (const Degree read : {Degree{1, 1}, {2, 1}, {4, 1}, {2, 2}}) {
      SCOPED_TRACE(testing::Message() << "tp " << written.tp << " pp " << written.pp
                                      << " read by tp " << read.tp << " pp " << read.pp);
      EngineOfRanks reader(dir(), read, std::string(16, name++));
      auto sequences = reader.run().Begin(model, kPrompt, Patient());
      EXPECT_EQ(watcher->Stats()->leases, 1);  // one for all ranks
      const RunOutputs outputs = reader.run().Run(model, sequences, kPrompt, kDecodeSteps);
      EXPECT_EQ(outputs.cached, kHit);
      EXPECT_TRUE(outputs.values == expected);
      sequences.clear();
      EXPECT_TRUE(Eventually([&] { return watcher->Stats()->leases == 0; }));
    }
    const KeyspaceId keyspace = watcher->Stats()->keyspaces[0].id;
    ASSERT_TRUE(watcher->Delete(keyspace, PageKeysOf(keyspace, model.tokens())).ok());
  }
}

TEST_F(CrumbdIntegrationTest, AWiderRankFillsInWhatIsMissing) {
  const SequenceModel model = Model();
  RankRun alone(SmallWorkerOptions(), {}, {nullptr});
  const std::vector<float> expected =
      alone.Run(model, alone.Begin(model, kPrompt), kPrompt, kDecodeSteps).values;
  // In an engine of two ranks only the second one's pages arrive.
  EngineOfRanks half(dir(), {2, 1}, std::string(16, 'h'));
  half.run().PublishRank(model, kPrompt, 1);
  EngineOfRanks whole(dir(), {}, std::string(16, 'w'));
  const auto hit = [&](EngineOfRanks& engine, int rank) {
    return engine.run().worker(rank).Begin(model.prompt(kPrompt), Patient()).value();
  };
  EXPECT_EQ(hit(half, 1)->cached_tokens(), kHit);
  EXPECT_EQ(hit(half, 0)->stats().miss_reason, "not_covered");
  EXPECT_EQ(hit(whole, 0)->stats().miss_reason, "not_covered");
  whole.run().Publish(model, kPrompt);
  for (EngineOfRanks* engine : {&half, &whole}) {
    const RunOutputs outputs = engine->run().Run(
        model, engine->run().Begin(model, kPrompt, Patient()), kPrompt, kDecodeSteps);
    EXPECT_EQ(outputs.cached, kHit);
    EXPECT_TRUE(outputs.values == expected);
  }
}

TEST_F(CrumbdIntegrationTest, FollowersOutliveTheLeaderAndDeadOnesHoldNothing) {
  const SequenceModel model = Model();
  EngineOfRanks writer(dir(), {}, std::string(16, 'w'));
  writer.run().Publish(model, kPrompt);
  const auto watcher = OpenClient(dir());
  EngineOfRanks engine(dir(), {2, 1}, std::string(16, 'e'));
  LedSequence led = engine.run().worker(0).Lead(model.prompt(kPrompt), Patient()).value();
  // A follower in a process of its own, which is killed.
  RoleProcess follower(
      "follow", dir(),
      HexEncode(std::span(reinterpret_cast<const uint8_t*>(led.token.data()), led.token.size())));
  ASSERT_TRUE(follower.WaitReady());
  auto other = engine.run().worker(1).Follow(led.token, model.prompt(kPrompt), Patient()).value();
  EXPECT_EQ(other->cached_tokens(), kHit);
  EXPECT_EQ(watcher->Stats()->leases, 1);
  const uint32_t sessions = watcher->Stats()->sessions;
  follower.Kill();
  EXPECT_TRUE(Eventually([&] { return watcher->Stats()->sessions == sessions - 1; }));
  EXPECT_EQ(watcher->Stats()->leases, 1);
  led.sequence.reset();
  other.reset();
  EXPECT_TRUE(Eventually([&] { return watcher->Stats()->leases == 0; }));
}

TEST_F(CrumbdIntegrationTest, PagesComeBackFromSsdAfterAKill) {
  EXPECT_EQ(RoleProcess("write", dir()).Wait(), 0);
  crumbd_.Kill();
  ASSERT_TRUE(crumbd_.Start());
  EXPECT_EQ(RoleProcess("read", dir(), "ssd").Wait(), 0);
}

TEST_F(CrumbdIntegrationTest, ALiveWorkerOutlivesCrumbd) {
  const SequenceModel model = Model();
  const auto client = OpenClient(dir());
  const auto worker = Worker::Open(SmallWorkerOptions(), client.get()).value();
  ASSERT_TRUE(PublishPrompt(*worker, model));
  ASSERT_TRUE(client->Flush(seconds(20)).ok());
  auto sequence = worker->Begin(model.prompt(kPrompt), Patient()).value();
  ASSERT_EQ(sequence->cached_tokens(), kHit);
  const uint64_t epoch = client->epoch();
  crumbd_.Kill();
  ASSERT_TRUE(Eventually([&] { return !client->connected(); }));
  EXPECT_TRUE(Decode(model, *sequence) == ColdOutputs(model));
  ASSERT_TRUE(crumbd_.Start());
  ASSERT_TRUE(client->WaitConnected(seconds(20)));
  EXPECT_NE(client->epoch(), epoch);
  sequence.reset();
  const auto again = worker->Begin(model.prompt(kPrompt), Patient()).value();
  EXPECT_EQ(again->stats().hit_tokens_ssd, kHit);
}

TEST_F(CrumbdIntegrationTest, ReservedPagesArePendingForOthers) {
  const auto writer = OpenClient(dir());
  const auto reader = OpenClient(dir());
  KeyspaceSpec spec;
  spec.fields = {{"model", "pending"}};
  spec.layers = 1;
  spec.kv_heads = 1;
  spec.head_dim = 64;
  spec.group_size = 64;
  const KeyspaceInfo keyspace = writer->OpenKeyspace(spec, seconds(5)).value();
  const uint8_t name = 1;
  const PageKey key = ForeignPageKey(keyspace.id, std::span(&name, 1));
  EXPECT_EQ(reader->Lookup(keyspace.id, std::span(&key, 1))->miss_reason, MissReason::kAbsent);
  const auto slots = writer->Reserve(1, 5000, PendingPages{keyspace.id, {key}}, seconds(5));
  ASSERT_TRUE(slots.ok()) << slots.status();
  EXPECT_EQ(reader->Lookup(keyspace.id, std::span(&key, 1))->miss_reason, MissReason::kPending);
}

TEST_F(CrumbdIntegrationTest, RespondsToEveryOtherCall) {
  const SequenceModel model = Model();
  const auto client = OpenClient(dir());
  const auto worker = Worker::Open(SmallWorkerOptions(), client.get()).value();
  ASSERT_TRUE(PublishPrompt(*worker, model));
  const CacheStats stats = client->Stats().value();
  ASSERT_EQ(stats.keyspaces.size(), 1);
  EXPECT_EQ(stats.keyspaces[0].model, "test-model");
  const KeyspaceId keyspace = stats.keyspaces[0].id;
  const std::vector<PageKey> keys = PageKeysOf(keyspace, model.tokens());

  EXPECT_EQ(client->Lookup(keyspace, keys)->hit_pages, kPages);
  EXPECT_EQ(client->Lookup(keyspace, keys)->miss_reason, MissReason::kAbsent);
  EXPECT_EQ(*client->Pin(keyspace, keys, seconds(60)), kPages);
  EXPECT_EQ(*client->Unpin(keyspace, keys), kPages);
  EXPECT_TRUE(client->Prefetch(keyspace, keys).ok());
  std::vector<FragmentBytes> got;
  const auto receive = [&](FragmentBytes fragment) {
    got.push_back(std::move(fragment));
    return absl::OkStatus();
  };
  ASSERT_TRUE(client->Get(keyspace, keys, seconds(10), receive).ok());
  ASSERT_EQ(got.size(), kPages);
  EXPECT_EQ(*client->Delete(keyspace, std::span(keys).last(keys.size() - 10)), kPages - 10);
  EXPECT_EQ(client->Lookup(keyspace, keys)->hit_pages, 10);
  const auto outcomes = client->Put(keyspace, got, seconds(10));
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  EXPECT_EQ(outcomes->front(), CommitOutcome::kDeduplicated);
  EXPECT_EQ(outcomes->back(), CommitOutcome::kStored);
  EXPECT_EQ(client->Lookup(keyspace, keys)->hit_pages, kPages);

  ASSERT_TRUE(client->SetKeyspaceState(keyspace, KeyspaceState::kBf16, "test", "quality").ok());
  EXPECT_EQ(worker->Begin(model.prompt(kPrompt), Patient()).value()->cached_tokens(), 0);
  ASSERT_TRUE(client->SetKeyspaceState(keyspace, KeyspaceState::kActive, "test", "again").ok());
  EXPECT_EQ(worker->Begin(model.prompt(kPrompt), Patient()).value()->cached_tokens(), kHit);

  EXPECT_EQ(*client->DropKeyspace(keyspace), stats.keyspaces[0].generation + 1);
  EXPECT_EQ(worker->Begin(model.prompt(kPrompt), Patient()).value()->cached_tokens(), 0);
  // The worker learns of the new generation from the first commit that is refused.
  ASSERT_TRUE(PublishPrompt(*worker, model));
  ASSERT_TRUE(PublishPrompt(*worker, model));
  EXPECT_EQ(worker->Begin(model.prompt(kPrompt), Patient()).value()->cached_tokens(), kHit);
}

TEST_F(CrumbdIntegrationTest, AChildForkedBeforeTheFirstOpenHasItsOwnConnection) {
  EXPECT_EQ(RoleProcess("fork", dir()).Wait(), 0);
}

// Both processes of a fork open a client after it.
int RunForked(const std::string& dir) {
  const pid_t child = ::fork();
  const auto client = OpenClient(dir);
  const bool connected = client->connected() && client->Stats().ok();
  if (child == 0) ::_exit(connected ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  return connected && WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}

}  // namespace

int RunRole(const std::string& role, const std::string& dir, const std::string& detail) {
  if (role == "write") return RunWriter(dir, false);
  if (role == "linger") return RunWriter(dir, true);
  if (role == "fork") return RunForked(dir);
  if (role == "follow") return RunFollower(dir, detail);
  return RunReader(dir, detail);
}

}  // namespace crumb::client

int main(int argc, char** argv) {
  if (argc == 4) return crumb::client::RunRole(argv[1], argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
