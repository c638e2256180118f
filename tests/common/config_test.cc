// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/config.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Inner {
  ByteSize bytes{uint64_t{64} << 20};
  Duration wait = std::chrono::milliseconds(5);

  void Visit(ConfigVisitor& visitor) {
    visitor.Field("bytes", bytes, "Room.");
    visitor.Field("wait", wait, "Time.");
  }
};

struct Outer {
  std::string name = "plain";
  bool flag = false;
  int64_t count = -3;
  double ratio = 0.25;
  std::vector<std::string> list = {"a"};
  Inner inner;

  void Visit(ConfigVisitor& visitor) {
    visitor.Field("name", name, "A name.");
    visitor.Field("flag", flag, "A switch.");
    visitor.Section("inner", [&] { inner.Visit(visitor); });
    visitor.Field("count", count, "A number.");
    visitor.Field("ratio", ratio, "A share.");
    visitor.Field("list", list, "Some.");
  }
};

absl::Status Read(const std::string& text, Outer& options) {
  return ReadConfig("test.yaml", text, [&](ConfigVisitor& visitor) { options.Visit(visitor); });
}

std::string ErrorOf(const std::string& text) {
  Outer options;
  const absl::Status status = Read(text, options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(status.message());
}

TEST(ConfigTest, ReadsEveryKind) {
  Outer options;
  ASSERT_TRUE(Read("name: x y\nflag: true\ncount: 12\nratio: 1e-3\nlist: [p, \"q r\"]\n"
                   "inner:\n  bytes: 3GiB\n  wait: 250us\n",
                   options)
                  .ok());
  EXPECT_EQ(options.name, "x y");
  EXPECT_TRUE(options.flag);
  EXPECT_EQ(options.count, 12);
  EXPECT_EQ(options.ratio, 1e-3);
  EXPECT_THAT(options.list, ElementsAre("p", "q r"));
  EXPECT_EQ(options.inner.bytes.value, uint64_t{3} << 30);
  EXPECT_EQ(options.inner.wait, std::chrono::microseconds(250));
}

TEST(ConfigTest, WhatIsNotThereKeepsItsValue) {
  for (const char* text : {"", "# nothing\n", "inner:\n", "{}"}) {
    Outer options;
    ASSERT_TRUE(Read(text, options).ok()) << text;
    EXPECT_EQ(options.count, -3);
    EXPECT_EQ(options.inner.bytes.value, uint64_t{64} << 20);
  }
}

TEST(ConfigTest, UnknownKeysNameLineAndPath) {
  EXPECT_EQ(ErrorOf("count: 1\nnmae: x\n"), "test.yaml:2: unknown key nmae; did you mean name?");
  EXPECT_EQ(ErrorOf("count: 1\ninner:\n  wait: 1s\n  byte: 3\n"),
            "test.yaml:4: unknown key inner.byte; did you mean bytes?");
  EXPECT_EQ(ErrorOf("inner:\n  bytse: 3\n"),
            "test.yaml:2: unknown key inner.bytse; did you mean bytes?");
  // Nothing is near enough, or too much to be a slip of the hand.
  for (const std::string& key : {std::string("sockets"), std::string("x"), std::string(500, 'b')})
    EXPECT_EQ(ErrorOf(key + ": x\n"), "test.yaml:1: unknown key " + key);
}

TEST(ConfigTest, RepeatedKeysAreErrors) {
  EXPECT_EQ(ErrorOf("count: 1\nflag: true\ncount: 2\n"), "test.yaml:3: key count is repeated");
  EXPECT_EQ(ErrorOf("inner:\n  wait: 1s\n  wait: 2s\n"), "test.yaml:3: key inner.wait is repeated");
}

TEST(ConfigTest, WrongKindsAreErrors) {
  EXPECT_THAT(ErrorOf("flag: yes\n"), HasSubstr("test.yaml:1: flag must be true or false"));
  EXPECT_THAT(ErrorOf("count: 1.5\n"), HasSubstr("count must be a whole number, not '1.5'"));
  EXPECT_THAT(ErrorOf("count: 99999999999999999999\n"), HasSubstr("count must be"));
  EXPECT_THAT(ErrorOf("count: [1]\n"), HasSubstr("count must be a whole number"));
  EXPECT_THAT(ErrorOf("ratio: nan\n"), HasSubstr("ratio must be a number"));
  EXPECT_THAT(ErrorOf("name:\n"), HasSubstr("name must be a string"));
  EXPECT_THAT(ErrorOf("list: a\n"), HasSubstr("list must be a list"));
  EXPECT_THAT(ErrorOf("list: [[a]]\n"), HasSubstr("list must hold strings"));
  EXPECT_THAT(ErrorOf("inner: 3\n"), HasSubstr("inner must be a mapping"));
  EXPECT_THAT(ErrorOf("inner:\n  wait: 5\n"), HasSubstr("inner.wait must be a duration"));
  EXPECT_THAT(ErrorOf("inner:\n  bytes: 5GB\n"), HasSubstr("inner.bytes must be bytes"));
  EXPECT_THAT(ErrorOf("- a\n- b\n"), HasSubstr("the file must be a mapping"));
  EXPECT_THAT(ErrorOf("[a]: 1\n"), HasSubstr("keys must be plain words"));
  EXPECT_THAT(ErrorOf("a: [\n"), HasSubstr("not YAML"));
}

TEST(ConfigTest, UnitsOfBytes) {
  EXPECT_EQ(ParseByteSize("0")->value, 0u);
  EXPECT_EQ(ParseByteSize("4097")->value, 4097u);
  EXPECT_EQ(ParseByteSize("64KiB")->value, 65536u);
  EXPECT_EQ(ParseByteSize("2TiB")->value, uint64_t{2} << 40);
  for (const char* text : {"", "GiB", "-1", "1 GiB", "1gib", "1.5GiB", "9223372036854775807KiB"}) {
    EXPECT_FALSE(ParseByteSize(text).ok()) << text;
  }
}

TEST(ConfigTest, UnitsOfTime) {
  EXPECT_EQ(*ParseDuration("0"), Duration::zero());
  EXPECT_EQ(*ParseDuration("90m"), std::chrono::minutes(90));
  EXPECT_EQ(*ParseDuration("7ns"), std::chrono::nanoseconds(7));
  for (const char* text : {"", "5", "ms", "-5ms", "5 ms", "5d", "9223372036854775807h"}) {
    EXPECT_FALSE(ParseDuration(text).ok()) << text;
  }
}

TEST(ConfigTest, FormatsParseBack) {
  std::mt19937_64 random(20240501);
  for (int i = 0; i < 2000; ++i) {
    const uint64_t value = random() >> (1 + random() % 63);
    EXPECT_EQ(ParseByteSize(FormatByteSize({value}))->value, value);
    const Duration duration{static_cast<int64_t>(value)};
    EXPECT_EQ(*ParseDuration(FormatDuration(duration)), duration);
  }
  EXPECT_EQ(FormatByteSize({uint64_t{64} << 30}), "64GiB");
  EXPECT_EQ(FormatDuration(std::chrono::minutes(90)), "90m");
}

TEST(ConfigTest, WhatIsPrintedReadsBack) {
  for (const bool comments : {false, true}) {
    for (const std::string name :
         {"", "null", "~", "a: b # c", "q\"\\\n\x01", "-", "a-b", "---", "*x", "12"}) {
      Outer written;
      written.name = name;
      written.list = {name, "b, c", "]"};
      written.inner.wait = std::chrono::hours(2);
      written.ratio = 1.0 / 3;
      const std::string text =
          PrintConfig([&](ConfigVisitor& visitor) { written.Visit(visitor); }, comments);
      Outer read;
      const absl::Status status = Read(text, read);
      ASSERT_TRUE(status.ok()) << status << "\n" << text;
      EXPECT_EQ(read.name, written.name) << text;
      EXPECT_EQ(read.list, written.list) << text;
      EXPECT_EQ(read.inner.wait, written.inner.wait);
      EXPECT_EQ(read.ratio, written.ratio);
      EXPECT_EQ(text.find("# A name.") != std::string::npos, comments);
    }
  }
}

TEST(ConfigTest, ListsKeysInOrder) {
  Outer options;
  EXPECT_THAT(ConfigKeys([&](ConfigVisitor& visitor) { options.Visit(visitor); }),
              ElementsAre("name", "flag", "inner.bytes", "inner.wait", "count", "ratio", "list"));
}

TEST(ConfigTest, MissingFileIsNamed) {
  Outer options;
  const absl::Status status = ReadConfigFile(
      "/nonexistent/crumbd.yaml", [&](ConfigVisitor& visitor) { options.Visit(visitor); });
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/crumbd.yaml"));
}

// An options struct with a bounded field of each kind.
struct Bounded {
  int64_t count = 5;
  ByteSize bytes{8 << 10};
  Duration wait = std::chrono::seconds(1);
  std::string mode = "fast";

  void Visit(ConfigVisitor& visitor) {
    visitor.Field("count", count, {.least = 1, .most = 10}, "A number.");
    visitor.Field("bytes", bytes, {.least = 4096}, "Room.");
    visitor.Field("wait", wait, kPositive, "Time.");
    visitor.Section("deep", [&] { visitor.Field("mode", mode, {"fast", "slow"}, "A word."); });
  }
};

TEST(ConfigTest, ValuesAreCheckedAgainstTheBoundsOfTheirFields) {
  EXPECT_TRUE(CheckValues("part", Bounded()).ok());
  for (const int64_t good : {1, 10}) EXPECT_TRUE(CheckValues("", Bounded{.count = good}).ok());
  EXPECT_TRUE(CheckValues("", Bounded{.bytes{4096}}).ok());
  const auto error_of = [](const Bounded& options) {
    const absl::Status status = CheckValues("part", options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(error_of({.count = 0}), "part.count is 0, must be from 1 to 10");
  EXPECT_EQ(error_of({.count = 11}), "part.count is 11, must be from 1 to 10");
  EXPECT_EQ(error_of({.bytes{4095}}), "part.bytes is 4095, must be at least 4KiB");
  EXPECT_EQ(error_of({.wait = Duration::zero()}), "part.wait is 0, must be more than 0");
  EXPECT_EQ(error_of({.mode = "odd"}), "part.deep.mode is 'odd', must be one of fast, slow");
  EXPECT_EQ(error_of({.count = 0, .mode = "odd"}), "part.count is 0, must be from 1 to 10");
}

}  // namespace
}  // namespace crumb
