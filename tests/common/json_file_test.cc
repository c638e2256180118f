// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/json_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/models/model_folder.h"

namespace crumb {
namespace {

using ::testing::HasSubstr;

constexpr char kWhere[] = "here.json";

template <typename T>
void ExpectNamed(const absl::StatusOr<T>& result, const char* part) {
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(kWhere));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(part));
}

TEST(JsonFileTest, ReadsFieldsOfTheirType) {
  const auto json = ParseJsonObject(
      R"({"i": -3, "n": 1e-6, "s": "x", "b": true, "o": {"a": 1}, "l": [1], "z": null})", kWhere);
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(*IntField(*json, "i", -3, 5, kWhere), -3);
  EXPECT_EQ(*PositiveField(*json, "n", kWhere), 1e-6);
  EXPECT_EQ(*StringField(*json, "s", kWhere), "x");
  EXPECT_EQ(*BoolField(*json, "b", false, kWhere), true);
  EXPECT_EQ(*BoolField(*json, "z", true, kWhere), true);
  EXPECT_EQ(*BoolField(*json, "absent", false, kWhere), false);
  EXPECT_EQ((*ObjectField(*json, "o", kWhere))->size(), 1u);
  EXPECT_EQ((*ArrayField(*json, "l", kWhere))->size(), 1u);
  EXPECT_TRUE(HasField(*json, "i"));
  EXPECT_FALSE(HasField(*json, "z"));
  EXPECT_FALSE(HasField(*json, "absent"));
}

TEST(JsonFileTest, ErrorsNameFileAndField) {
  const nlohmann::json json = {{"text", "4"}, {"big", UINT64_MAX}, {"real", 4.0}, {"zero", 0.0}};
  for (const char* key : {"text", "big", "real", "absent"}) {
    ExpectNamed(IntField(json, key, INT64_MIN, INT64_MAX, kWhere), key);
  }
  ExpectNamed(IntField({{"n", 9}}, "n", 0, 8, kWhere), "from 0 to 8");
  for (const char* key : {"text", "zero", "absent"}) {
    ExpectNamed(PositiveField(json, key, kWhere), key);
  }
  ExpectNamed(StringField(json, "real", kWhere), "a string");
  ExpectNamed(BoolField(json, "zero", true, kWhere), "true or false");
  ExpectNamed(ObjectField(json, "text", kWhere), "an object");
  ExpectNamed(ArrayField(json, "text", kWhere), "an array");
}

TEST(JsonFileTest, RefusesWhatIsNoJsonObject) {
  for (const char* text : {"", "{", "[]", "1", "\"x\"", "{\"a\": \xff}", "{} {}", "{\"a\": nan}"}) {
    ExpectNamed(ParseJsonObject(text, kWhere), "");
  }
  // Nesting takes no stack.
  ExpectNamed(ParseJsonObject("{\"a\":" + std::string(1'000'000, '['), kWhere), "not valid JSON");
}

TEST(JsonFileTest, NestingHasABound) {
  const auto nested = [](size_t depth) {
    return "{\"a\": " + std::string(depth, '[') + std::string(depth, ']') + "}";
  };
  EXPECT_TRUE(ParseJsonObject(nested(127), "f").ok());
  for (const size_t depth : {size_t{128}, size_t{1000000}}) {
    const absl::Status status = ParseJsonObject(nested(depth), "f").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("f: arrays and objects nest deeper"));
  }
  // Brackets in texts, and those that are closed again, do not count.
  const std::string text =
      "{\"" + std::string(200, '[') + "\\\"" + std::string(200, '{') + "\": 1}";
  EXPECT_TRUE(ParseJsonObject(text, "f").ok());
  std::string flat = "{\"a\": [[]";
  for (int i = 0; i < 200; ++i) flat += ",[]";
  EXPECT_TRUE(ParseJsonObject(flat + "]}", "f").ok());
}

TEST(JsonFileTest, ReadsFilesUpToALimit) {
  models::ModelFolder folder;
  const std::string path = folder.path() + "/f";
  EXPECT_EQ(ReadFile(path, 10).status().code(), absl::StatusCode::kNotFound);
  folder.Write("f", std::string("12345"));
  EXPECT_EQ(*ReadFile(path, 5), "12345");
  EXPECT_EQ(ReadFile(path, 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFile(folder.path(), 1 << 20).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb
