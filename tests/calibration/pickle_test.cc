// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/pickle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace crumb::calibration {
namespace {

using ::testing::HasSubstr;
using Kind = PickleValue::Kind;
using namespace std::string_literals;

absl::StatusOr<Pickle> Parse(const std::string& bytes) {
  return Pickle::Parse(std::as_bytes(std::span(bytes)), {"collections OrderedDict", "torch Thing"},
                       "file.pt: entry data.pkl");
}

std::string ErrorOf(const std::string& bytes) {
  const auto pickle = Parse(bytes);
  EXPECT_FALSE(pickle.ok());
  EXPECT_EQ(pickle.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(pickle.status().message()), HasSubstr("file.pt: entry data.pkl: byte "));
  return std::string(pickle.status().message());
}

// pickle.dumps({"a": [1, 300, 70000, -2, 2**40, -2**40, 0.5, None, True, False], "t": (1, "x")}, 2)
const std::string kSample =
    "\x80\x02}q\x00(X\x01\x00\x00\x00"
    "aq\x01]q\x02(K\x01M,\x01J\x70\x11\x01\x00J\xfe\xff\xff\xff\x8a\x06\x00\x00\x00\x00\x00\x01"
    "\x8a\x06\x00\x00\x00\x00\x00\xffG?\xe0\x00\x00\x00\x00\x00\x00N\x88\x89"
    "eX\x01\x00\x00\x00tq\x03K\x01X\x01\x00\x00\x00xq\x04\x86q\x05u."s;

TEST(PickleTest, ReadsWhatPythonWrites) {
  const auto pickle = Parse(kSample);
  ASSERT_TRUE(pickle.ok()) << pickle.status();
  const PickleValue* list = pickle->Find(pickle->root(), "a");
  ASSERT_NE(list, nullptr);
  ASSERT_EQ(list->items.size(), 10u);
  const auto item = [&](int i) -> const PickleValue& { return pickle->At(list->items[i]); };
  const int64_t integers[] = {1, 300, 70000, -2, int64_t{1} << 40, -(int64_t{1} << 40)};
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(item(i).kind, Kind::kInt);
    EXPECT_EQ(item(i).integer, integers[i]);
  }
  EXPECT_EQ(item(6).kind, Kind::kFloat);
  EXPECT_EQ(item(6).number, 0.5);
  EXPECT_EQ(item(7).kind, Kind::kNone);
  EXPECT_EQ(item(8).integer, 1);
  EXPECT_EQ(item(9).kind, Kind::kBool);
  const PickleValue* tuple = pickle->Find(pickle->root(), "t");
  ASSERT_NE(tuple, nullptr);
  EXPECT_EQ(tuple->kind, Kind::kTuple);
  EXPECT_EQ(pickle->At(tuple->items[1]).text, "x");
  EXPECT_EQ(pickle->Find(pickle->root(), "b"), nullptr);
}

TEST(PickleTest, ACallIsDataAndAnOrderedDictADictionary) {
  const auto call = Parse("\x80\x02"s + "ctorch\nThing\n(K\x07tR.");
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->root().kind, Kind::kCall);
  EXPECT_EQ(call->At(call->root().items[0]).text, "torch Thing");
  EXPECT_EQ(call->At(call->At(call->root().items[1]).items[0]).integer, 7);
  const auto dict = Parse("\x80\x02"s + "ccollections\nOrderedDict\n)R(K\x01K\x02u.");
  ASSERT_TRUE(dict.ok()) << dict.status();
  EXPECT_EQ(dict->root().kind, Kind::kDict);
  EXPECT_EQ(dict->root().items.size(), 2u);
}

TEST(PickleTest, WhatRunsCodeElsewhereIsRefused) {
  EXPECT_THAT(ErrorOf("\x80\x02"s + "cos\nsystem\n(X\x02\x00\x00\x00idtR."s),
              HasSubstr("global \"os system\""));
  EXPECT_THAT(ErrorOf("\x80\x02"s + "cbuiltins\neval\n."), HasSubstr("builtins eval"));
  // The opcodes are INST, OBJ, NEWOBJ, BUILD, STACK_GLOBAL, EXT1, PERSID and FRAME.
  for (const char opcode : "io\x81"s + "b\x93\x82P\x95") {
    EXPECT_THAT(ErrorOf("\x80\x02K\x01"s + opcode + "."), HasSubstr("opcode"));
  }
  EXPECT_THAT(ErrorOf("\x80\x04."), HasSubstr("protocol 4"));
  EXPECT_THAT(ErrorOf("\x80\x02K\x01)R."), HasSubstr("a call of something"));
}

TEST(PickleTest, CyclesAreRefused) {
  EXPECT_THAT(ErrorOf("\x80\x02]q\x00h\x00"s + "a."s), HasSubstr("contains itself"));
  // The dictionary contains a list that contains the dictionary.
  EXPECT_THAT(ErrorOf("\x80\x02}q\x00K\x01]h\x00"s + "as."), HasSubstr("contains itself"));
  // A value that occurs twice is no cycle.
  EXPECT_TRUE(Parse("\x80\x02]q\x01h\x01\x86."s).ok());
}

TEST(PickleTest, MalformedProgramsAreRefused) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("truncated"));
  EXPECT_THAT(ErrorOf("\x80\x02."), HasSubstr("one value"));
  EXPECT_THAT(ErrorOf("\x80\x02(."), HasSubstr("one value"));
  EXPECT_THAT(ErrorOf("\x80\x02t."), HasSubstr("mark"));
  EXPECT_THAT(ErrorOf("\x80\x02\x86."), HasSubstr("too short"));
  EXPECT_THAT(ErrorOf("\x80\x02(\x85."), HasSubstr("too short"));
  EXPECT_THAT(ErrorOf("\x80\x02h\x05."), HasSubstr("never remembered"));
  EXPECT_THAT(ErrorOf("\x80\x02q\x05."s), HasSubstr("nothing to remember"));
  EXPECT_THAT(ErrorOf("\x80\x02}(K\x01u."), HasSubstr("key without a value"));
  EXPECT_THAT(ErrorOf("\x80\x02K\x01(K\x01u."), HasSubstr("takes none"));
  EXPECT_THAT(ErrorOf("\x80\x02X\xff\xff\xff\xff."), HasSubstr("truncated"));
  EXPECT_THAT(ErrorOf("\x80\x02\x8a\x09"s + "123456789."), HasSubstr("64 bits"));
  EXPECT_THAT(ErrorOf("\x80\x02"s + std::string(5 << 20, 'N')), HasSubstr("more values"));
}

TEST(PickleTest, EveryTruncationIsAnErrorAndNoFlippedByteCrashes) {
  for (size_t size = 0; size < kSample.size(); ++size) ErrorOf(kSample.substr(0, size));
  std::mt19937 random(11);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = kSample;
    for (int flips = 0; flips < 3; ++flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    (void)Parse(bytes).ok();
  }
}

}  // namespace
}  // namespace crumb::calibration
