// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Runs the crumb command against a real crumbd over its Unix socket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "bench/servers_under_test.h"
#include "crumb/client.h"
#include "nlohmann/json.hpp"
#include "tests/common/temporary_folder.h"
#include "tests/tools/sample_fragment.h"
#include "tools/command_line.h"
#include "tools/commands.h"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  int code = -1;
  std::string out;
  std::string error;

  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

class CrumbIntegrationTest : public testing::Test {
 protected:
  void SetUp() override {
    bench::CrumbdSettings settings;
    settings.program = CRUMBD_PROGRAM;
    settings.host_bytes.value = 64 << 20;
    settings.slab_bytes.value = 16 << 20;
    settings.ssd_bytes.value = 256 << 20;
    auto crumbd = bench::CrumbdUnderTest::Start(settings);
    ASSERT_TRUE(crumbd.ok()) << crumbd.status();
    crumbd_ = *std::move(crumbd);
    client::ClientOptions options;
    options.socket_dir = crumbd_->socket_dir();
    auto client = client::Client::Open(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client::KeyspaceSpec spec;
    spec.fields = {{"model", "example"}, {"format", "int2"}};
    spec.layers = 2;
    spec.kv_heads = 2;
    spec.head_dim = 128;
    spec.group_size = 128;
    const auto keyspace = (*client)->OpenKeyspace(spec, std::chrono::seconds(10));
    ASSERT_TRUE(keyspace.ok()) << keyspace.status();
    fragment_ = SampleInt2Fragment({}, 23);
    fragment_.header.range = {{0, 2}, {0, 2}};  // all of a page
    fragment_.header.keyspace = keyspace->id;
    fragment_.header.generation = keyspace->generation;
    keyspace_ = keyspace->id.ToHex();
    key_ = fragment_.header.key.ToHex();
  }

  Outcome Run(std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"crumb", "--json", "--timeout", "30", "--socket-dir", crumbd_->socket_dir()});
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    const auto parsed = ParseCommandLine(static_cast<int>(argv.size()), argv.data());
    if (const auto* exit = std::get_if<EarlyExit>(&parsed)) {
      return {exit->code, exit->out, exit->error};
    }
    std::ostringstream out, error;
    const int code = RunCommandLine(
        std::get<CommandLine>(parsed), [] { return false; }, out, error);
    return {code, out.str(), error.str()};
  }

  const TemporaryFolder folder_;
  std::unique_ptr<bench::CrumbdUnderTest> crumbd_;
  FragmentFile fragment_;
  std::string keyspace_;
  std::string key_;
};

TEST_F(CrumbIntegrationTest, APageGoesInAndComesOutUnchanged) {
  const std::string in = folder_.File("in"), out = folder_.File("out");
  ASSERT_TRUE(WriteFragmentFile(in, fragment_.header, fragment_.tiles).ok());
  const Outcome put = Run({"put", keyspace_, in});
  ASSERT_EQ(put.code, 0) << put.error;
  EXPECT_EQ(put.json()["rows"][0]["outcome"], "stored");
  EXPECT_EQ(Run({"put", keyspace_, in}).json()["rows"][0]["outcome"], "there already");
  const Outcome get = Run({"get", keyspace_, key_, "--out", out});
  ASSERT_EQ(get.code, 0) << get.error;
  const auto back = ReadFragmentFile(out);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->header, fragment_.header);
  EXPECT_EQ(back->tiles, fragment_.tiles);
  EXPECT_EQ(Run({"page", "inspect", out}).json()["damaged_tiles"], 0);
  const Outcome flush = Run({"flush"});
  ASSERT_EQ(flush.code, 0) << flush.error;
  EXPECT_GE(flush.json()["durable_pages"].get<int>(), 1);
}

TEST_F(CrumbIntegrationTest, StatusNamesTiersAndTheKeyspace) {
  const Outcome status = Run({"status"});
  ASSERT_EQ(status.code, 0) << status.error;
  EXPECT_EQ(status.json()["health"], "serving");
  EXPECT_GE(status.json()["tiers"].size(), 2u);
  ASSERT_EQ(status.json()["keyspaces"].size(), 1u);
  EXPECT_EQ(status.json()["keyspaces"][0]["keyspace"], keyspace_);
  const Outcome stats = Run({"stats"});
  ASSERT_EQ(stats.code, 0) << stats.error;
  EXPECT_TRUE(stats.json()["counters"].is_object());
}

TEST_F(CrumbIntegrationTest, SteersKeyspacesAndPages) {
  const std::string in = folder_.File("in");
  ASSERT_TRUE(WriteFragmentFile(in, fragment_.header, fragment_.tiles).ok());
  ASSERT_EQ(Run({"put", keyspace_, in}).code, 0);
  EXPECT_EQ(Run({"pin", keyspace_, key_, "--ttl", "60"}).json()["pinned_pages"], 1);
  EXPECT_EQ(Run({"unpin", keyspace_, key_}).json()["unpinned_pages"], 1);
  ASSERT_EQ(Run({"keyspace", "state", keyspace_, "bf16", "--reason", "drift"}).code, 0);
  EXPECT_EQ(Run({"status"}).json()["keyspaces"][0]["reason"], "drift");
  ASSERT_EQ(Run({"keyspace", "state", keyspace_, "active", "--reason", "fixed"}).code, 0);
  EXPECT_EQ(Run({"drop", keyspace_, key_, "--yes"}).json()["deleted_pages"], 1);
  const Outcome get = Run({"get", keyspace_, key_, "--out", folder_.File("out")});
  EXPECT_EQ(get.code, kExitFailure);
  EXPECT_THAT(get.error, HasSubstr("miss"));
  EXPECT_EQ(Run({"drop", keyspace_, "--yes"}).code, 0);
}

TEST_F(CrumbIntegrationTest, AnUnknownKeyspaceIsAnError) {
  const Outcome lookup = Run({"lookup", std::string(64, '0'), key_});
  EXPECT_EQ(lookup.code, kExitFailure);
  EXPECT_THAT(lookup.error, HasSubstr("crumb: "));
}

}  // namespace
}  // namespace crumb::tools
