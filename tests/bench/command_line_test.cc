// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/common/temporary_folder.h"

namespace crumb::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::variant<CommandLine, EarlyExit> Parse(const std::vector<std::string>& words) {
  std::vector<const char*> argv = {"crumb-bench"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data(), "/programs");
}

CommandLine Parsed(const std::vector<std::string>& words) {
  auto result = Parse(words);
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
  EXPECT_THAT(exit.error, HasSubstr("crumb-bench: "));
  EXPECT_EQ(std::count(exit.error.begin(), exit.error.end(), '\n'), 1) << exit.error;
}

TEST(CommandLineTest, NamesWhatIsNoSubcommandAndThoseThereAre) {
  const auto error_of = [](const std::vector<std::string>& words) {
    return std::get<EarlyExit>(Parse(words)).error;
  };
  constexpr const char* kAll = "codec, kernels, decode, store, replay, simulate, quality (see";
  EXPECT_THAT(error_of({"sotre", "--json"}), HasSubstr("'sotre' is no subcommand: they are"));
  EXPECT_THAT(error_of({"sotre", "--json"}), HasSubstr(kAll));
  EXPECT_THAT(error_of({}), HasSubstr("a subcommand is required"));
  EXPECT_THAT(error_of({}), HasSubstr(kAll));
  EXPECT_THAT(error_of({"--jsno"}), HasSubstr("'--jsno'"));
}

INSTANTIATE_TEST_SUITE_P(
    All, WrongArgumentsTest,
    testing::Values(std::vector<std::string>{}, std::vector<std::string>{"nothing"},
                    std::vector<std::string>{"replay"},
                    std::vector<std::string>{"replay", "--trace", "/no/such/file"},
                    std::vector<std::string>{"replay", "--synthetic", "unknown"},
                    std::vector<std::string>{"replay", "--synthetic", "zipf", "--policy", "best"},
                    std::vector<std::string>{"replay", "--synthetic", "zipf", "--capacity-gb", "0"},
                    std::vector<std::string>{"replay", "--synthetic", "zipf", "--format", "int4"},
                    std::vector<std::string>{"replay", "--synthetic", "zipf", "--model", "other"},
                    std::vector<std::string>{"quality"},
                    std::vector<std::string>{"quality", "--model", "/no/such", "--text", "LICENSE"},
                    std::vector<std::string>{"quality", "--model", ".", "--text", "/no/such"},
                    std::vector<std::string>{"quality", "--model", ".", "--text", "LICENSE",
                                             "--methods", "zip"},
                    std::vector<std::string>{"quality", "--model", ".", "--text", "LICENSE",
                                             "--device", "tpu"},
                    std::vector<std::string>{"store", "--planes", "rdma"},
                    std::vector<std::string>{"store", "--ops", "fly"},
                    std::vector<std::string>{"store", "--sizes", "0"},
                    std::vector<std::string>{"store", "--sizes", "big"},
                    std::vector<std::string>{"store", "--seconds", "-1"},
                    std::vector<std::string>{"store", "--redis", "6379"},
                    std::vector<std::string>{"store", "--planes", "ssd", "--socket-dir", "/tmp"},
                    std::vector<std::string>{"store", "--crumbd", "x", "--socket-dir", "/tmp"},
                    std::vector<std::string>{"codec", "--rounds", "0"},
                    std::vector<std::string>{"decode", "--shape", "gpt-2"},
                    std::vector<std::string>{"decode", "--context", "414"},
                    std::vector<std::string>{"decode", "--batch", "1,0"},
                    std::vector<std::string>{"decode", "--kv", "int4"},
                    std::vector<std::string>{"decode", "--memory-gb", "0"}));

TEST(CommandLineTest, ReadsReplay) {
  const TemporaryFolder folder;
  std::ofstream(folder.File("trace")) << "";
  const CommandLine line =
      Parsed({"replay", "--trace", folder.File("trace"), "--capacity-gb", "16,64.5", "--format",
              "bf16", "--model", "qwen3-8b", "--policy", "lru,belady", "--simulate", "--json"});
  EXPECT_TRUE(line.json);
  const auto& options = std::get<ReplayOptions>(line.workload);
  EXPECT_THAT(options.capacities_gb, ElementsAre(16, 64.5));
  EXPECT_EQ(options.format, kernels::PageFormat::kBf16);
  EXPECT_THAT(options.policies, ElementsAre("lru", "belady"));
}

TEST(CommandLineTest, ReadsStore) {
  const CommandLine line =
      Parsed({"store", "--planes", "shm,grpc", "--sizes", "128KiB,1MiB,4608", "--seconds", "0.5",
              "--redis", "auto", "--ops", "put", "--beside-load", "2"});
  const auto& options = std::get<StoreWorkloadOptions>(line.workload);
  EXPECT_THAT(options.planes, ElementsAre("shm", "grpc"));
  EXPECT_THAT(options.operations, ElementsAre("put"));
  EXPECT_THAT(options.fragment_bytes, ElementsAre(128 << 10, 1 << 20, 4608));
  EXPECT_EQ(options.seconds, 0.5);
  EXPECT_EQ(options.crumbd, "/programs/crumbd");
  EXPECT_EQ(options.beside_load, 2u);
}

TEST(CommandLineTest, ReadsCodec) {
  const CommandLine line = Parsed({"codec", "--contexts", "1024,4096", "--rounds", "3"});
  const auto& options = std::get<CodecOptions>(line.workload);
  EXPECT_THAT(options.contexts, ElementsAre(1024, 4096));
  EXPECT_EQ(options.rounds, 3);
}

TEST(CommandLineTest, ReadsQuality) {
  const std::vector<std::string> words = {"quality",   "--model",   ".",          "--text",
                                          "LICENSE",   "README.md", "--methods",  "bf16,kivi,crumb",
                                          "--context", "1024,4096", "--passkeys", "0",
                                          "--plot",    "kl.svg"};
  const CommandLine line = Parsed(words);
  const auto& options = std::get<QualityOptions>(line.workload);
  EXPECT_THAT(options.texts, ElementsAre("LICENSE", "README.md"));
  EXPECT_THAT(options.methods, ElementsAre("bf16", "kivi", "crumb"));
  EXPECT_THAT(options.contexts, ElementsAre(1024, 4096));
  EXPECT_EQ(options.passkeys, 0);
  EXPECT_EQ(options.sequences, 16);
  EXPECT_EQ(options.device, "cpu");
  EXPECT_EQ(options.plot, "kl.svg");
}

TEST(CommandLineTest, KernelsRunsTheProgramBesideIt) {
  const CommandLine line = Parsed({"kernels", "--only", "0,4", "--json"});
  const auto& kernels = std::get<KernelsOptions>(line.workload);
  EXPECT_THAT(
      KernelsArguments(kernels, line.json, "abc"),
      ElementsAre("/programs/crumb-kernel-bench", "--json", "--commit", "abc", "--only", "0,4"));
  EXPECT_THAT(KernelsArguments({.program = "/p", .only = {}}, false, "abc"), ElementsAre("/p"));
  const absl::Status status = RunKernels(kernels, line.json, "abc");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/programs/crumb-kernel-bench"));
}

TEST(CommandLineTest, DecodeRunsTheProgramBesideIt) {
  const CommandLine line =
      Parsed({"decode", "--shape", "qwen3-4b,glm-4.7", "--batch", "1,8", "--kv", "int2", "--json"});
  const auto& decode = std::get<DecodeOptions>(line.workload);
  EXPECT_THAT(DecodeArguments(decode, line.json, "abc"),
              ElementsAre("/programs/crumb-decode-bench", "--shape", "qwen3-4b,glm-4.7",
                          "--context", "102400", "--batch", "1,8", "--kv", "int2", "--memory-gb",
                          "80", "--json", "--commit", "abc"));
  const absl::Status status = RunDecode(decode, line.json, "abc");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/programs/crumb-decode-bench"));
}

}  // namespace
}  // namespace crumb::bench
