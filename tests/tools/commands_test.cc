// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "crumb/client.h"
#include "nlohmann/json.hpp"
#include "tests/common/temporary_folder.h"
#include "tests/tools/sample_fragment.h"
#include "tools/fragment_file.h"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSeed = 3;

// A crumbd with one keyspace in memory. Calls that no command makes return kUnimplemented.
class MemoryClient : public client::Client {
 public:
  bool connected() override { return true; }
  uint64_t epoch() override { return 1; }
  bool WaitConnected(Duration) override { return true; }

  absl::StatusOr<client::KeyspaceInfo> OpenKeyspace(const client::KeyspaceSpec&,
                                                    Duration) override {
    return absl::UnimplementedError("");
  }
  absl::Status SetKeyspaceState(const KeyspaceId&, client::KeyspaceState new_state,
                                const std::string& new_who,
                                const std::string& new_reason) override {
    state = new_state;
    who = new_who;
    reason = new_reason;
    return absl::OkStatus();
  }
  client::KeyspaceState StateOf(const KeyspaceId&) override { return state; }
  absl::StatusOr<client::AcquireResult> Acquire(const client::AcquireRequest&) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<client::LookupResult> Lookup(const KeyspaceId&,
                                              std::span<const PageKey> keys) override {
    client::LookupResult result;
    for (const PageKey& key : keys) {
      if (!pages.contains(key)) {
        result.miss_reason = client::MissReason::kAbsent;
        break;
      }
      result.page_tiers.push_back(client::Tier::kHost);
      ++result.hit_pages;
    }
    return result;
  }
  absl::StatusOr<std::vector<client::StagingSlot>> Reserve(int, size_t, const client::PendingPages&,
                                                           Duration) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::vector<client::CommitOutcome>> Commit(const KeyspaceId&,
                                                            std::vector<client::StagingSlot>,
                                                            size_t, Duration) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint64_t> Flush(Duration) override { return pages.size(); }
  absl::StatusOr<client::MissReason> Get(const KeyspaceId&, std::span<const PageKey> keys, Duration,
                                         const client::FragmentReceiver& receiver) override {
    const auto page = pages.find(keys[0]);
    if (page == pages.end()) return client::MissReason::kAbsent;
    for (const client::FragmentBytes& fragment : page->second) {
      if (absl::Status status = receiver(fragment); !status.ok()) return status;
    }
    return client::MissReason::kNone;
  }
  absl::StatusOr<std::vector<client::CommitOutcome>> Put(
      const KeyspaceId&, std::span<const client::FragmentBytes> fragments, Duration) override {
    std::vector<client::CommitOutcome> outcomes;
    for (const client::FragmentBytes& fragment : fragments) {
      if (outcomes.size() >= room) {
        outcomes.push_back(client::CommitOutcome::kNoRoom);
        continue;
      }
      pages[fragment.header.key].push_back(fragment);
      outcomes.push_back(client::CommitOutcome::kStored);
    }
    return outcomes;
  }
  absl::StatusOr<uint32_t> Prefetch(const KeyspaceId&, std::span<const PageKey>) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint32_t> Pin(const KeyspaceId&, std::span<const PageKey> keys,
                               Duration ttl) override {
    pinned_for = ttl;
    return static_cast<uint32_t>(keys.size());
  }
  absl::StatusOr<uint32_t> Unpin(const KeyspaceId&, std::span<const PageKey>) override { return 0; }
  absl::StatusOr<uint32_t> Delete(const KeyspaceId&, std::span<const PageKey> keys) override {
    uint32_t deleted = 0;
    for (const PageKey& key : keys) deleted += static_cast<uint32_t>(pages.erase(key));
    return deleted;
  }
  absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId&) override {
    pages.clear();
    return 2;
  }
  absl::StatusOr<client::CacheStats> Stats() override { return stats; }
  absl::StatusOr<client::NodeList> ListNodes() override { return nodes; }
  absl::StatusOr<client::PageLocation> LocatePage(const KeyspaceId&, const PageKey& key) override {
    client::PageLocation place;
    place.run = key;
    place.homes = {"node-1"};
    place.holders = {"node-1", "node-2"};
    return place;
  }
  absl::Status DrainNode(const std::string& node) override {
    drained = node;
    return absl::OkStatus();
  }
  void Count(const client::SessionCounters&) override {}

  std::map<PageKey, std::vector<client::FragmentBytes>> pages;
  client::CacheStats stats;
  client::NodeList nodes;
  std::string drained;
  client::KeyspaceState state = client::KeyspaceState::kUnknown;
  std::string who;
  std::string reason;
  Duration pinned_for{};
  size_t room = 100;  // fragments that one Put may store
};

client::FragmentBytes ToBytes(const FragmentFile& file) {
  client::FragmentBytes fragment;
  fragment.header = file.header;
  fragment.tiles.assign(reinterpret_cast<const char*>(file.tiles.data()), file.tiles.size());
  return fragment;
}

class CommandsTest : public testing::Test {
 protected:
  std::string Store(const std::string& name, const FragmentFile& fragment) {
    const std::string path = folder_.File(name);
    EXPECT_TRUE(WriteFragmentFile(path, fragment.header, fragment.tiles).ok());
    return path;
  }

  CommandResult Run(const Command& command) {
    return RunOnCrumbd(command, std::chrono::seconds(1), crumbd_);
  }

  const TemporaryFolder folder_;
  MemoryClient crumbd_;
  const FragmentFile fragment_ = SampleInt2Fragment({}, kSeed);
  const std::string keyspace_ = fragment_.header.keyspace.ToHex();
  const std::string key_ = fragment_.header.key.ToHex();
};

TEST_F(CommandsTest, NodesWhereAndDrain) {
  crumbd_.nodes.view_epoch = 7;
  client::NodeList::Node node;
  node.id = "aaaa-1";
  node.state = "active";
  crumbd_.nodes.nodes.push_back(node);
  node.id = "aabb-2";
  node.state = "drained";
  crumbd_.nodes.nodes.push_back(node);
  crumbd_.nodes.refused = {"node x has another layout"};
  crumbd_.nodes.trouble = "for 3 s etcd does not respond";
  const CommandResult nodes = Run(NodesCommand{});
  EXPECT_EQ(nodes.json["nodes"].size(), 2u);
  EXPECT_NE(nodes.text.find("refused: node x has another layout"), std::string::npos);
  EXPECT_NE(nodes.text.find("trouble: for 3 s etcd"), std::string::npos);
  EXPECT_EQ(nodes.json["trouble"], "for 3 s etcd does not respond");
  const CommandResult where = Run(WhereCommand{key_, ""});
  EXPECT_EQ(where.json["run"], key_);
  EXPECT_NE(where.text.find("held by         node-1, node-2"), std::string::npos);
  EXPECT_FALSE(Run(DrainCommand{"aa", false}).status.ok());  // two nodes
  EXPECT_EQ(crumbd_.drained, "");
  EXPECT_EQ(Run(DrainCommand{"aab", true}).json["state"], "drained");
  EXPECT_EQ(crumbd_.drained, "aabb-2");
}

TEST_F(CommandsTest, PutThenLookupThenGetGivesTheSameBytes) {
  const std::string path = Store("in", fragment_);
  const CommandResult put = Run(PutCommand{keyspace_, {path}});
  ASSERT_TRUE(put.status.ok()) << put.status;
  EXPECT_EQ(put.json["rows"][0]["outcome"], "stored");
  const CommandResult lookup = Run(LookupCommand{keyspace_, {key_, std::string(64, '0')}, ""});
  EXPECT_EQ(lookup.json["hit_pages"], 1);
  EXPECT_EQ(lookup.json["rows"][0]["tier"], "host");
  EXPECT_EQ(lookup.json["rows"][1]["tier"], "miss");
  EXPECT_EQ(lookup.json["miss_reason"], "absent");
  const CommandResult get = Run(GetCommand{keyspace_, key_, folder_.File("out")});
  ASSERT_TRUE(get.status.ok()) << get.status;
  const auto back = ReadFragmentFile(folder_.File("out"));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->header, fragment_.header);
  EXPECT_EQ(back->tiles, fragment_.tiles);
}

TEST_F(CommandsTest, PagesOfSeveralFragmentsGoToSeveralFiles) {
  crumbd_.pages[fragment_.header.key] = {ToBytes(fragment_), ToBytes(fragment_)};
  const CommandResult get = Run(GetCommand{keyspace_, key_, folder_.File("out")});
  ASSERT_EQ(get.json["rows"].size(), 2u);
  EXPECT_TRUE(ReadFragmentFile(folder_.File("out.1")).ok());
}

TEST_F(CommandsTest, AFragmentThatIsNotStoredIsShownAndIsAFailure) {
  const std::string first = Store("first", fragment_), second = Store("second", fragment_);
  crumbd_.room = 1;
  const CommandResult put = Run(PutCommand{keyspace_, {first, second}});
  EXPECT_EQ(put.json["rows"][0]["outcome"], "stored");
  EXPECT_EQ(put.json["rows"][1]["outcome"], "no room");
  EXPECT_THAT(std::string(put.status.message()), HasSubstr("second"));
}

TEST_F(CommandsTest, ADamagedFileIsNotSent) {
  FragmentFile damaged = fragment_;
  damaged.tiles[4608] ^= std::byte{1};
  const CommandResult put = Run(PutCommand{keyspace_, {Store("bad", damaged)}});
  EXPECT_EQ(put.status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(put.status.message()), HasSubstr("tile 1"));
  EXPECT_TRUE(crumbd_.pages.empty());
}

TEST_F(CommandsTest, AMissIsAFailureWithItsReason) {
  const CommandResult get = Run(GetCommand{keyspace_, key_, folder_.File("out")});
  EXPECT_EQ(get.status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(get.status.message()), HasSubstr("absent"));
}

TEST_F(CommandsTest, LookupByTokensMakesTheKeysItself) {
  std::vector<int32_t> tokens;
  std::ofstream file(folder_.File("tokens"));
  for (int i = 0; i < 130; ++i) {
    tokens.push_back(7 * i);
    file << 7 * i << (i % 3 == 0 ? ", " : "\n");
  }
  file.close();
  const auto keys = PageKeysOf(fragment_.header.keyspace, tokens);
  ASSERT_EQ(keys.size(), 2u);
  crumbd_.pages[keys[0]] = {};
  const CommandResult lookup = Run(LookupCommand{keyspace_, {}, folder_.File("tokens")});
  ASSERT_TRUE(lookup.status.ok()) << lookup.status;
  EXPECT_EQ(lookup.json["pages"], 2);
  EXPECT_EQ(lookup.json["hit_pages"], 1);
  EXPECT_EQ(lookup.json["rows"][1]["key"], keys[1].ToHex());
  std::ofstream(folder_.File("words")) << "1 2 three";
  EXPECT_FALSE(Run(LookupCommand{keyspace_, {}, folder_.File("words")}).status.ok());
  std::ofstream(folder_.File("few")) << "1 2 3";
  EXPECT_FALSE(Run(LookupCommand{keyspace_, {}, folder_.File("few")}).status.ok());
}

TEST_F(CommandsTest, SteeringCommandsSayWhatWasDone) {
  crumbd_.pages[fragment_.header.key] = {ToBytes(fragment_)};
  EXPECT_EQ(Run(FlushCommand{}).json["durable_pages"], 1);
  EXPECT_EQ(Run(PinCommand{keyspace_, {key_}, 2.5}).json["pinned_pages"], 1);
  EXPECT_EQ(crumbd_.pinned_for, std::chrono::milliseconds(2500));
  EXPECT_EQ(Run(UnpinCommand{keyspace_, {key_}}).json["unpinned_pages"], 0);
  EXPECT_EQ(Run(DropCommand{keyspace_, {key_}, true}).json["deleted_pages"], 1);
  EXPECT_EQ(Run(DropCommand{keyspace_, {}, true}).json["generation"], 2);
  Run(KeyspaceStateCommand{keyspace_, "bf16", "drift"});
  EXPECT_EQ(crumbd_.state, client::KeyspaceState::kBf16);
  EXPECT_EQ(crumbd_.reason, "drift");
  EXPECT_THAT(crumbd_.who, HasSubstr("uid"));
}

TEST_F(CommandsTest, TooManyKeysAreRefusedHere) {
  const std::vector<std::string> keys(100'000, key_);
  const CommandResult lookup = Run(LookupCommand{keyspace_, keys, ""});
  EXPECT_EQ(lookup.status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CommandsTest, StatsAddUpHitsAndBytesSaved) {
  crumbd_.stats.lookup_tokens = {{"host", 600}, {"ssd", 200}, {"miss", 200}, {"window", 5000}};
  client::CacheStats::TierStats tier;
  tier.tier = client::Tier::kHost;
  tier.state = "active";
  tier.resident_bytes = 100;
  tier.resident_logical_bytes = 711;
  crumbd_.stats.tiers = {tier};
  crumbd_.stats.counters["dedup_bytes_total"] = 4;
  const CommandResult stats = Run(StatsCommand{});
  EXPECT_DOUBLE_EQ(stats.json["hit_rate"], 0.8);
  EXPECT_DOUBLE_EQ(stats.json["bytes_saved_factor"], 7.11);
  EXPECT_EQ(stats.json["counters"]["dedup_bytes_total"], 4);
  EXPECT_THAT(stats.text, HasSubstr("80.0 %"));
  EXPECT_THAT(stats.text, HasSubstr("7.11x"));
}

TEST_F(CommandsTest, StatusNamesTiersAndKeyspaces) {
  client::CacheStats::KeyspaceStats keyspace;
  keyspace.state = client::KeyspaceState::kBf16;
  keyspace.state_reason = "drift";
  client::CacheStats::TierStats host, ssd;
  host.tier = client::Tier::kHost;
  host.state = "active";
  ssd.tier = client::Tier::kSsd;
  ssd.state = "read-only: disk full";
  crumbd_.stats.keyspaces = {keyspace};
  crumbd_.stats.tiers = {host, ssd};
  const CommandResult status = Run(StatusCommand{});
  EXPECT_EQ(status.json["health"], "degraded: ssd read-only: disk full");
  EXPECT_EQ(status.json["keyspaces"][0]["state"], "bf16");
  EXPECT_EQ(status.json["tiers"][1]["tier"], "ssd");
  EXPECT_THAT(status.text, HasSubstr("drift"));
}

TEST_F(CommandsTest, PageInspectShowsADamagedPageAndFails) {
  FragmentFile damaged = fragment_;
  damaged.tiles[4608] ^= std::byte{1};
  const CommandResult result = RunPageInspect({Store("bad", damaged), {}});
  EXPECT_EQ(result.status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(result.json["damaged_tiles"], 1);
  std::ostringstream out, error;
  EXPECT_EQ(PrintResult(result, true, out, error), kExitFailure);
  EXPECT_EQ(nlohmann::json::parse(out.str())["damaged_tiles"], 1);
  EXPECT_THAT(error.str(), HasSubstr("1 of 4 tiles are damaged"));
}

TEST_F(CommandsTest, PageInspectPrintsRowsOfOneTile) {
  const std::string path = Store("page", fragment_);
  const CommandResult result = RunPageInspect({path, PageInspectCommand::Tile{2, 1}});
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.json["rows"].size(), 128u);
  EXPECT_EQ(result.json["rows"][0]["codes"].size(), 128u);
  EXPECT_FALSE(RunPageInspect({path, PageInspectCommand::Tile{9, 1}}).status.ok());
}

TEST(RunCommandLineTest, WithoutCrumbdTheErrorNamesTheSocketAndTheWayOut) {
  const TemporaryFolder folder;
  CommandLine line;
  line.socket_dir = folder.path();
  line.timeout_seconds = 5;
  line.command = StatusCommand{};
  std::ostringstream out, error;
  EXPECT_EQ(RunCommandLine(
                line, [] { return false; }, out, error),
            kExitFailure);
  EXPECT_EQ(out.str(), "");
  EXPECT_THAT(error.str(), HasSubstr(folder.path() + "/crumbd.fd.sock"));
  EXPECT_THAT(error.str(), HasSubstr("--socket-dir"));
}

}  // namespace
}  // namespace crumb::tools
