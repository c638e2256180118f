// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/common/temporary_folder.h"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

const std::string kId(64, 'a');

std::variant<CommandLine, EarlyExit> Parse(std::vector<std::string> words) {
  std::vector<const char*> argv = {"crumb"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
}

CommandLine Parsed(std::vector<std::string> words) {
  auto result = Parse(std::move(words));
  if (const auto* exit = std::get_if<EarlyExit>(&result)) {
    ADD_FAILURE() << exit->error;
    return {};
  }
  return std::get<CommandLine>(result);
}

class WrongArgumentsTest : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(WrongArgumentsTest, AreOneLineAndCodeTwo) {
  const auto result = Parse(GetParam());
  ASSERT_TRUE(std::holds_alternative<EarlyExit>(result));
  const auto& exit = std::get<EarlyExit>(result);
  EXPECT_EQ(exit.code, kExitUsage);
  EXPECT_EQ(exit.out, "");
  EXPECT_THAT(exit.error, HasSubstr("crumb: "));
  EXPECT_EQ(std::count(exit.error.begin(), exit.error.end(), '\n'), 1) << exit.error;
}

INSTANTIATE_TEST_SUITE_P(
    All, WrongArgumentsTest,
    testing::Values(std::vector<std::string>{}, std::vector<std::string>{"nothing"},
                    std::vector<std::string>{"lookup", "xyz", kId},
                    std::vector<std::string>{"lookup", kId},
                    std::vector<std::string>{"lookup", kId, kId.substr(1)},
                    std::vector<std::string>{"lookup", kId, kId, "--tokens-file", "/dev/null"},
                    std::vector<std::string>{"get", kId, kId},
                    std::vector<std::string>{"get", kId, "--out", "x"},
                    std::vector<std::string>{"put", kId, "/no/such/file"},
                    std::vector<std::string>{"drop", kId}, std::vector<std::string>{"pin", kId},
                    std::vector<std::string>{"pin", kId, kId, "--ttl", "-1"},
                    std::vector<std::string>{"keyspace"},
                    std::vector<std::string>{"status", "--tls-ca", "ca.pem"},
                    std::vector<std::string>{"status", "--address", "h:1", "--tls-cert", "c.pem"},
                    std::vector<std::string>{"status", "--address", "h:1", "--tls-ca", "ca.pem",
                                             "--tls-cert", "c.pem"},
                    std::vector<std::string>{"keyspace", "state", kId, "int4", "--reason", "x"},
                    std::vector<std::string>{"keyspace", "state", kId, "bf16"},
                    std::vector<std::string>{"page", "inspect"},
                    std::vector<std::string>{"page", "inspect", "/dev/null", "--tile", "3"},
                    std::vector<std::string>{"stats", "--watch", "0"},
                    std::vector<std::string>{"status", "--timeout", "never"},
                    std::vector<std::string>{"status", "--unknown"}));

TEST(CommandLineTest, SecurityIsForEverySubcommand) {
  const CommandLine line =
      Parsed({"status", "--address", "h:1", "--tls-ca", "ca.pem", "--tls-cert", "c.pem",
              "--tls-key", "k.pem", "--tls-server-name", "crumbd", "--token-file", "t"});
  EXPECT_EQ(line.tls_ca_file, "ca.pem");
  EXPECT_EQ(line.tls_cert_file, "c.pem");
  EXPECT_EQ(line.tls_key_file, "k.pem");
  EXPECT_EQ(line.tls_server_name, "crumbd");
  EXPECT_EQ(line.token_file, "t");
}

TEST(CommandLineTest, HelpAndVersionAreNoErrors) {
  const auto help = Parse({"--help"});
  ASSERT_TRUE(std::holds_alternative<EarlyExit>(help));
  EXPECT_EQ(std::get<EarlyExit>(help).code, 0);
  EXPECT_THAT(std::get<EarlyExit>(help).out, HasSubstr("Examples:"));
  const auto version = Parse({"--version"});
  EXPECT_EQ(std::get<EarlyExit>(version).code, 0);
  EXPECT_THAT(std::get<EarlyExit>(version).out, HasSubstr("crumb "));
}

TEST(CommandLineTest, GlobalOptionsStandBeforeOrAfterTheCommand) {
  for (const auto& words : {std::vector<std::string>{"--json", "--socket-dir", "/tmp/x", "status"},
                            {"status", "--json", "--socket-dir", "/tmp/x"}}) {
    const CommandLine line = Parsed(words);
    EXPECT_TRUE(line.json);
    EXPECT_EQ(line.socket_dir, "/tmp/x");
    EXPECT_TRUE(std::holds_alternative<StatusCommand>(line.command));
  }
}

TEST(CommandLineTest, ReadsEveryCommand) {
  EXPECT_EQ(std::get<StatsCommand>(Parsed({"stats", "--watch", "2"}).command).watch_seconds, 2);
  const std::string other(64, '0');
  const CommandLine lookup_line = Parsed({"lookup", kId, other, kId});
  const auto& lookup = std::get<LookupCommand>(lookup_line.command);
  EXPECT_EQ(lookup.keyspace, kId);
  EXPECT_EQ(lookup.keys, (std::vector<std::string>{other, kId}));
  const CommandLine get_line = Parsed({"get", kId, other, "--out", "f"});
  EXPECT_EQ(std::get<GetCommand>(get_line.command).key, other);
  const CommandLine drop_line = Parsed({"drop", kId, "--yes"});
  EXPECT_TRUE(std::get<DropCommand>(drop_line.command).keys.empty());
  const CommandLine pin_line = Parsed({"pin", kId, other, "--ttl", "1.5"});
  EXPECT_EQ(std::get<PinCommand>(pin_line.command).ttl_seconds, 1.5);
  EXPECT_TRUE(std::holds_alternative<UnpinCommand>(Parsed({"unpin", kId, other}).command));
  EXPECT_TRUE(std::holds_alternative<FlushCommand>(Parsed({"flush"}).command));
  const CommandLine state_line = Parsed({"keyspace", "state", kId, "bf16", "--reason", "drift"});
  EXPECT_EQ(std::get<KeyspaceStateCommand>(state_line.command).state, "bf16");
}

TEST(CommandLineTest, ReadsFilesAndTiles) {
  const TemporaryFolder folder;
  std::ofstream(folder.File("f")) << "x";
  const CommandLine inspect_line = Parsed({"page", "inspect", folder.File("f"), "--tile", "3,1"});
  const auto& inspect = std::get<PageInspectCommand>(inspect_line.command);
  ASSERT_TRUE(inspect.tile.has_value());
  EXPECT_EQ(inspect.tile->layer, 3);
  EXPECT_EQ(inspect.tile->head, 1);
  const CommandLine put_line = Parsed({"put", kId, folder.File("f"), folder.File("f")});
  EXPECT_EQ(std::get<PutCommand>(put_line.command).files.size(), 2u);
}

}  // namespace
}  // namespace crumb::tools
