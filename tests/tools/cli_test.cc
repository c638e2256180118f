// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/cli.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "CLI/CLI.hpp"

namespace crumb::tools {
namespace {

using ::testing::HasSubstr;

std::optional<EarlyExit> Parse(CLI::App& app, std::vector<const char*> words) {
  words.insert(words.begin(), "prog");
  return ParseArguments(app, static_cast<int>(words.size()), words.data());
}

TEST(CliTest, RightArgumentsLetTheProgramGoOn) {
  CLI::App app("Does nothing.", "prog");
  int value = 0;
  app.add_option("--value", value);
  EXPECT_FALSE(Parse(app, {"--value", "3"}).has_value());
  EXPECT_EQ(value, 3);
}

TEST(CliTest, HelpGoesToStandardOutput) {
  CLI::App app("Does nothing.", "prog");
  const auto exit = Parse(app, {"--help"});
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->code, 0);
  EXPECT_THAT(exit->out, HasSubstr("Does nothing."));
  EXPECT_EQ(exit->error, "");
}

TEST(CliTest, WrongArgumentsAreOneLineThatNamesProgramAndHelp) {
  CLI::App app("Does nothing.", "prog");
  const auto exit = Parse(app, {"--vlaue"});
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->code, kExitUsage);
  EXPECT_EQ(exit->out, "");
  EXPECT_THAT(exit->error, testing::MatchesRegex("prog: [^\n]*--vlaue[^\n]* .see prog --help.\n"));
}

TEST(CliTest, AMissingSubcommandListsAll) {
  const auto error_of = [](std::vector<const char*> words) {
    CLI::App app("Does nothing.", "prog");
    app.require_subcommand(1);
    app.add_subcommand("first");
    app.add_subcommand("second");
    return Parse(app, std::move(words))->error;
  };
  EXPECT_EQ(error_of({}),
            "prog: a subcommand is required: one of first, second (see prog --help)\n");
  EXPECT_EQ(error_of({"thrid"}),
            "prog: 'thrid' is no subcommand: they are first, second (see prog --help)\n");
}

TEST(CliTest, FindsTheFolderOfTheProgram) {
  EXPECT_TRUE(std::filesystem::exists(ProgramFolder() + "/tools_cli_test"));
}

}  // namespace
}  // namespace crumb::tools
