// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "nlohmann/json.hpp"
#include "tests/tools/sample_fragment.h"
#include "tests/tools/temp_folder.h"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSeed = 3;

// A crumbd of one keyspace in memory.
class MemoryCrumbd : public CrumbdConnection {
 public:
  absl::StatusOr<std::string> Health() override { return std::string("serving"); }
  absl::StatusOr<v1::StatsResponse> Stats() override { return stats; }
  absl::StatusOr<v1::LookupResponse> Lookup(const v1::LookupRequest& request) override {
    v1::LookupResponse response;
    for (size_t at = 0; at < request.keys().size(); at += 32) {
      if (!pages.contains(request.keys().substr(at, 32))) break;
      response.add_page_tiers(v1::TIER_HOST);
    }
    response.set_hit_pages(static_cast<uint32_t>(response.page_tiers_size()));
    if (response.hit_pages() * 32 < request.keys().size()) {
      response.set_miss_reason(v1::MISS_REASON_ABSENT);
    }
    return response;
  }
  absl::StatusOr<v1::FlushResponse> Flush() override {
    v1::FlushResponse response;
    response.set_durable_pages(pages.size());
    return response;
  }
  absl::StatusOr<v1::PinResponse> Pin(const v1::PinRequest& request) override {
    pinned_ms = request.ttl_ms();
    v1::PinResponse response;
    response.set_pinned_pages(1);
    return response;
  }
  absl::StatusOr<v1::UnpinResponse> Unpin(const v1::UnpinRequest&) override {
    return v1::UnpinResponse();
  }
  absl::StatusOr<v1::DeleteResponse> Delete(const v1::DeleteRequest& request) override {
    v1::DeleteResponse response;
    response.set_deleted_pages(static_cast<uint32_t>(pages.erase(request.keys())));
    return response;
  }
  absl::StatusOr<v1::DropKeyspaceResponse> DropKeyspace(const v1::DropKeyspaceRequest&) override {
    pages.clear();
    v1::DropKeyspaceResponse response;
    response.set_generation(2);
    return response;
  }
  absl::Status SetKeyspaceState(const v1::SetKeyspaceStateRequest& request) override {
    state = request;
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<FragmentFile>> GetPage(const KeyspaceId&,
                                                    const PageKey& key) override {
    const auto page = pages.find(std::string(key.view()));
    if (page == pages.end()) return absl::NotFoundError("the page is a miss: absent");
    return page->second;
  }
  absl::StatusOr<v1::PutResponse> Put(const KeyspaceId&,
                                      const std::vector<FragmentFile>& fragments) override {
    v1::PutResponse response;
    for (const FragmentFile& fragment : fragments) {
      if (!VerifyTileSums(fragment.header, fragment.tiles).ok()) {
        response.add_outcomes(v1::COMMIT_OUTCOME_REFUSED);
        response.set_first_error("checksum differs");
        continue;
      }
      pages[std::string(fragment.header.key.view())].push_back(fragment);
      response.add_outcomes(v1::COMMIT_OUTCOME_STORED);
    }
    return response;
  }

  std::map<std::string, std::vector<FragmentFile>> pages;
  v1::StatsResponse stats;
  v1::SetKeyspaceStateRequest state;
  uint64_t pinned_ms = 0;
};

class CommandsTest : public testing::Test {
 protected:
  std::string Store(const std::string& name, const FragmentFile& fragment) {
    const std::string path = folder_.File(name);
    EXPECT_TRUE(WriteFragmentFile(path, fragment.header, fragment.tiles).ok());
    return path;
  }

  const TempFolder folder_;
  MemoryCrumbd crumbd_;
  const FragmentFile fragment_ = SampleInt2Fragment({}, kSeed);
  const std::string keyspace_ = fragment_.header.keyspace.ToHex();
  const std::string key_ = fragment_.header.key.ToHex();
};

TEST_F(CommandsTest, PutThenLookupThenGetGivesTheSameBytes) {
  const std::string path = Store("in", fragment_);
  const CommandResult put = RunOnCrumbd(PutCommand{keyspace_, {path}}, crumbd_);
  ASSERT_TRUE(put.status.ok()) << put.status;
  EXPECT_EQ(put.json["rows"][0]["outcome"], "stored");
  const CommandResult lookup =
      RunOnCrumbd(LookupCommand{keyspace_, {key_, std::string(64, '0')}, ""}, crumbd_);
  EXPECT_EQ(lookup.json["hit_pages"], 1);
  EXPECT_EQ(lookup.json["rows"][0]["tier"], "host");
  EXPECT_EQ(lookup.json["rows"][1]["tier"], "miss");
  EXPECT_EQ(lookup.json["miss_reason"], "absent");
  const CommandResult get = RunOnCrumbd(GetCommand{keyspace_, key_, folder_.File("out")}, crumbd_);
  ASSERT_TRUE(get.status.ok()) << get.status;
  const auto back = ReadFragmentFile(folder_.File("out"));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->header, fragment_.header);
  EXPECT_EQ(back->tiles, fragment_.tiles);
}

TEST_F(CommandsTest, PagesOfSeveralFragmentsGoToSeveralFiles) {
  crumbd_.pages[std::string(fragment_.header.key.view())] = {fragment_, fragment_};
  const CommandResult get = RunOnCrumbd(GetCommand{keyspace_, key_, folder_.File("out")}, crumbd_);
  ASSERT_EQ(get.json["rows"].size(), 2u);
  EXPECT_TRUE(ReadFragmentFile(folder_.File("out.1")).ok());
}

TEST_F(CommandsTest, ARefusedFragmentIsShownAndIsAFailure) {
  FragmentFile damaged = fragment_;
  damaged.tiles[0] ^= std::byte{1};
  const std::string good = Store("good", fragment_), bad = Store("bad", damaged);
  const CommandResult put = RunOnCrumbd(PutCommand{keyspace_, {good, bad}}, crumbd_);
  EXPECT_EQ(put.json["rows"][0]["outcome"], "stored");
  EXPECT_EQ(put.json["rows"][1]["outcome"], "refused");
  EXPECT_THAT(std::string(put.status.message()), HasSubstr("bad"));
  EXPECT_THAT(std::string(put.status.message()), HasSubstr("checksum differs"));
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
  crumbd_.pages[std::string(keys[0].view())] = {};
  const CommandResult lookup =
      RunOnCrumbd(LookupCommand{keyspace_, {}, folder_.File("tokens")}, crumbd_);
  ASSERT_TRUE(lookup.status.ok()) << lookup.status;
  EXPECT_EQ(lookup.json["pages"], 2);
  EXPECT_EQ(lookup.json["hit_pages"], 1);
  EXPECT_EQ(lookup.json["rows"][1]["key"], keys[1].ToHex());
  std::ofstream(folder_.File("words")) << "1 2 three";
  EXPECT_FALSE(
      RunOnCrumbd(LookupCommand{keyspace_, {}, folder_.File("words")}, crumbd_).status.ok());
  std::ofstream(folder_.File("few")) << "1 2 3";
  EXPECT_FALSE(RunOnCrumbd(LookupCommand{keyspace_, {}, folder_.File("few")}, crumbd_).status.ok());
}

TEST_F(CommandsTest, SteeringCommandsSayWhatWasDone) {
  crumbd_.pages[std::string(fragment_.header.key.view())] = {fragment_};
  EXPECT_EQ(RunOnCrumbd(FlushCommand{}, crumbd_).json["durable_pages"], 1);
  EXPECT_EQ(RunOnCrumbd(PinCommand{keyspace_, {key_}, 2.5}, crumbd_).json["pinned_pages"], 1);
  EXPECT_EQ(crumbd_.pinned_ms, 2500u);
  EXPECT_EQ(RunOnCrumbd(UnpinCommand{keyspace_, {key_}}, crumbd_).json["unpinned_pages"], 0);
  EXPECT_EQ(RunOnCrumbd(DropCommand{keyspace_, {key_}, true}, crumbd_).json["deleted_pages"], 1);
  EXPECT_EQ(RunOnCrumbd(DropCommand{keyspace_, {}, true}, crumbd_).json["generation"], 2);
  RunOnCrumbd(KeyspaceStateCommand{keyspace_, "bf16", "drift"}, crumbd_);
  EXPECT_EQ(crumbd_.state.state(), v1::KEYSPACE_STATE_BF16);
  EXPECT_EQ(crumbd_.state.reason(), "drift");
  EXPECT_THAT(crumbd_.state.who(), HasSubstr("uid"));
}

TEST_F(CommandsTest, TooManyKeysAreRefusedHere) {
  const std::vector<std::string> keys(100'000, key_);
  const CommandResult lookup = RunOnCrumbd(LookupCommand{keyspace_, keys, ""}, crumbd_);
  EXPECT_EQ(lookup.status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CommandsTest, StatsAddUpHitsAndBytesSaved) {
  auto& tokens = *crumbd_.stats.mutable_lookup_tokens();
  tokens["host"] = 600;
  tokens["ssd"] = 200;
  tokens["miss"] = 200;
  tokens["window"] = 5000;
  auto* tier = crumbd_.stats.add_tiers();
  tier->set_tier(v1::TIER_HOST);
  tier->set_resident_bytes(100);
  tier->set_resident_logical_bytes(711);
  (*crumbd_.stats.mutable_counters())["dedup_bytes_total"] = 4;
  const CommandResult stats = RunOnCrumbd(StatsCommand{}, crumbd_);
  EXPECT_DOUBLE_EQ(stats.json["hit_rate"], 0.8);
  EXPECT_DOUBLE_EQ(stats.json["bytes_saved_factor"], 7.11);
  EXPECT_EQ(stats.json["counters"]["dedup_bytes_total"], 4);
  EXPECT_THAT(stats.text, HasSubstr("80.0 %"));
  EXPECT_THAT(stats.text, HasSubstr("7.11x"));
}

TEST_F(CommandsTest, StatusNamesTiersAndKeyspaces) {
  crumbd_.stats.set_version("9.9");
  auto* keyspace = crumbd_.stats.add_keyspaces();
  keyspace->set_keyspace(std::string(32, '\x01'));
  keyspace->set_state(v1::KEYSPACE_STATE_BF16);
  keyspace->set_state_reason("drift");
  crumbd_.stats.add_tiers()->set_tier(v1::TIER_SSD);
  const CommandResult status = RunOnCrumbd(StatusCommand{}, crumbd_);
  EXPECT_EQ(status.json["health"], "serving");
  EXPECT_EQ(status.json["keyspaces"][0]["state"], "bf16");
  EXPECT_EQ(status.json["tiers"][0]["tier"], "ssd");
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
  const TempFolder folder;
  CommandLine line;
  line.socket_dir = folder.path();
  line.timeout_seconds = 5;
  line.command = StatusCommand{};
  std::ostringstream out, error;
  EXPECT_EQ(RunCommandLine(
                line, [] { return false; }, out, error),
            kExitFailure);
  EXPECT_EQ(out.str(), "");
  EXPECT_THAT(error.str(), HasSubstr(folder.path() + "/crumbd.sock"));
  EXPECT_THAT(error.str(), HasSubstr("--socket-dir"));
}

}  // namespace
}  // namespace crumb::tools
