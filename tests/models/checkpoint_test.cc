// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/models/model_folder.h"

namespace crumb::models {
namespace {

using ::testing::HasSubstr;

std::string Name() { return "a.weight"; }

// Returns the status of opening a checkpoint whose only file has these bytes.
absl::Status OpenBytes(const std::string& bytes) {
  ModelFolder folder;
  folder.Write("model.safetensors", bytes);
  return Checkpoint::Open(folder.path()).status();
}

std::string OneTensor(const nlohmann::json& entry, const std::string& data) {
  return JoinSafetensors(nlohmann::json{{Name(), entry}}.dump(), data);
}

TEST(CheckpointTest, ReadsWhatWasWritten) {
  ModelFolder folder;
  RawTensors tensors;
  tensors["a"] = {"BF16", {2, 3}, "abcdefghijkl"};
  tensors["b"] = {"F32", {1}, "wxyz"};
  tensors["c"] = {"F16", {}, "hh"};
  tensors["d"] = {"I64", {0, 5}, ""};
  folder.Write("model.safetensors", FormatSafetensors(tensors));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const char* name : {"a", "b", "c"}) {
    const auto tensor = (*checkpoint)->Find(name, tensors[name].shape);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(std::string(DTypeName(tensor->dtype)), tensors[name].dtype);
    EXPECT_EQ(
        std::string(reinterpret_cast<const char*>(tensor->bytes.data()), tensor->bytes.size()),
        tensors[name].bytes);
  }
}

TEST(CheckpointTest, ErrorsOfFindNameTensorFileAndShapes) {
  ModelFolder folder;
  folder.Write("model.safetensors",
               FormatSafetensors({{"a", {"BF16", {2, 3}, std::string(12, 'x')}},
                                  {"b", {"I64", {1}, std::string(8, 'x')}}}));
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const absl::Status missing = (*checkpoint)->Find("model.norm.weight", {1}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("model.norm.weight"));
  EXPECT_THAT(std::string(missing.message()), HasSubstr(folder.path()));
  const absl::Status shape = (*checkpoint)->Find("a", {3, 2}).status();
  EXPECT_EQ(shape.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shape.message()), HasSubstr("[2, 3]"));
  EXPECT_THAT(std::string(shape.message()), HasSubstr("[3, 2]"));
  EXPECT_THAT(std::string(shape.message()), HasSubstr("model.safetensors"));
  const absl::Status dtype = (*checkpoint)->Find("b", {1}).status();
  EXPECT_EQ(dtype.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(dtype.message()), HasSubstr("I64"));
}

TEST(CheckpointTest, RefusesDamagedHeaders) {
  const nlohmann::json good = {{"dtype", "F32"}, {"shape", {2}}, {"data_offsets", {0, 8}}};
  const std::string data(8, 'd');
  ASSERT_TRUE(OpenBytes(OneTensor(good, data)).ok());
  const auto changed = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json entry = good;
    entry[key] = value;
    return OneTensor(entry, data);
  };
  struct Case {
    const char* name;
    std::string bytes;
    const char* in_message;
  };
  const Case cases[] = {
      {"empty file", "", "0 bytes"},
      {"short file", "abc", "3 bytes"},
      {"header beyond the file", std::string("\xff\xff\0\0\0\0\0\0ab", 10), "header of 65535"},
      {"header of 2^64 - 1", std::string(8, '\xff') + "ab", "header of 18446744073709551615"},
      {"no JSON", JoinSafetensors("{\"a\": ", data), "JSON"},
      {"no object", JoinSafetensors("[]", data), "object"},
      {"entry is no object", OneTensor("x", data), "a.weight"},
      {"range outside", changed("data_offsets", {0, 12}), "outside"},
      {"range backwards", changed("data_offsets", {8, 0}), "outside"},
      {"negative", changed("data_offsets", {-4, 4}), "data_offsets"},
      {"huge", changed("data_offsets", {0, 18446744073709551615u}), "data_offsets"},
      {"three offsets", changed("data_offsets", {0, 4, 8}), "data_offsets"},
      {"no offsets", changed("data_offsets", nullptr), "data_offsets"},
      {"shape too small", changed("shape", {1}), "shape [1]"},
      {"shape overflows", changed("shape", {int64_t{1} << 62, 16}), "shape"},
      {"negative size", changed("shape", {-2}), "shape"},
      {"shape is text", changed("shape", {"2"}), "shape"},
      {"too many dimensions", changed("shape", std::vector<int>(9, 1)), "shape"},
      {"dtype", changed("dtype", "F31"), "F31"},
      {"dtype is a number", changed("dtype", 3), "dtype"},
      {"bytes left over", OneTensor(good, data + "rest"), "after the last"},
      {"truncated", OneTensor(good, data.substr(1)), "truncated"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const absl::Status status = OpenBytes(c.bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.in_message));
  }
}

TEST(CheckpointTest, RefusesOverlapsAndGaps) {
  const auto two = [](int begin, int end) {
    const nlohmann::json header = {
        {"a", {{"dtype", "U8"}, {"shape", {8}}, {"data_offsets", {0, 8}}}},
        {"b", {{"dtype", "U8"}, {"shape", {end - begin}}, {"data_offsets", {begin, end}}}}};
    return OpenBytes(JoinSafetensors(header.dump(), std::string(16, 'x')));
  };
  EXPECT_TRUE(two(8, 16).ok());
  for (const auto& [begin, end] : {std::pair(4, 16), std::pair(9, 16), std::pair(0, 16)}) {
    const absl::Status status = two(begin, end);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << begin;
    EXPECT_THAT(std::string(status.message()), HasSubstr("begins at byte"));
  }
}

// A prefix of a file, and a file with a changed header byte, is opened or refused without a crash.
TEST(CheckpointTest, SurvivesTruncationAndBitFlips) {
  RawTensors tensors;
  for (const char* name : {"a", "b", "c"}) tensors[name] = {"BF16", {4, 4}, std::string(32, 'x')};
  const std::string file = FormatSafetensors(tensors);
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(OpenBytes(file.substr(0, size)).ok()) << size;
  }
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::string damaged = file;
    damaged[random() % (file.size() - 96)] ^= static_cast<char>(1 << random() % 8);
    ModelFolder folder;
    folder.Write("model.safetensors", damaged);
    const auto checkpoint = Checkpoint::Open(folder.path());
    if (!checkpoint.ok()) continue;
    for (const char* name : {"a", "b", "c"}) {
      const auto tensor = (*checkpoint)->Find(name, {4, 4});
      if (tensor.ok()) {
        EXPECT_EQ(tensor->bytes.size(), 32u);
      }
    }
  }
}

class ShardTest : public testing::Test {
 protected:
  ShardTest() {
    WriteIndex({{"a", "one.safetensors"}, {"b", "two.safetensors"}});
    folder_.Write("one.safetensors", FormatSafetensors({{"a", {"F32", {1}, "aaaa"}}}));
    folder_.Write("two.safetensors", FormatSafetensors({{"b", {"F32", {1}, "bbbb"}}}));
  }
  void WriteIndex(const nlohmann::json& map) {
    folder_.Write("model.safetensors.index.json", nlohmann::json{{"weight_map", map}});
  }
  absl::Status Open() { return Checkpoint::Open(folder_.path()).status(); }

  ModelFolder folder_;
};

TEST_F(ShardTest, FindsTensorsInTheirShards) {
  const auto checkpoint = Checkpoint::Open(folder_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->Find("a", {1})->file, HasSubstr("one.safetensors"));
  EXPECT_THAT((*checkpoint)->Find("b", {1})->file, HasSubstr("two.safetensors"));
}

TEST_F(ShardTest, NamesAMissingShard) {
  std::filesystem::remove(folder_.path() + "/two.safetensors");
  EXPECT_EQ(Open().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(Open().message()), HasSubstr("two.safetensors"));
}

TEST_F(ShardTest, NamesATensorThatItsShardLacks) {
  WriteIndex({{"a", "one.safetensors"}, {"b", "one.safetensors"}});
  EXPECT_EQ(Open().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Open().message()), HasSubstr("no tensor b"));
}

TEST_F(ShardTest, RefusesShardsOutsideTheDirectory) {
  for (const char* shard : {"../one.safetensors", "/etc/passwd", "..", ""}) {
    WriteIndex({{"a", shard}});
    EXPECT_EQ(Open().code(), absl::StatusCode::kInvalidArgument) << shard;
  }
}

TEST_F(ShardTest, RefusesDamagedIndexes) {
  for (const std::string text :
       {"", "{}", "{\"weight_map\": []}", "{\"weight_map\": {\"a\": 3}}"}) {
    folder_.Write("model.safetensors.index.json", text);
    EXPECT_EQ(Open().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(CheckpointTest, SaysWhatIsMissingInAnEmptyDirectory) {
  ModelFolder folder;
  const absl::Status status = Checkpoint::Open(folder.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace crumb::models
