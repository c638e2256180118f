// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/rotation_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "tests/common/temporary_folder.h"

namespace crumb {
namespace {

using ::testing::HasSubstr;

class RotationFileTest : public testing::Test {
 protected:
  std::string Path() const { return folder_.File("rotation.safetensors"); }
  std::string Bytes() const {
    std::ifstream in(Path(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  void Write(const std::string& bytes) const {
    std::ofstream(Path(), std::ios::binary | std::ios::trunc) << bytes;
  }
  size_t FilesInFolder() const {
    return std::distance(std::filesystem::directory_iterator(folder_.path()), {});
  }

 private:
  const TemporaryFolder folder_;
};

RotationFile Sample() {
  RotationFile file;
  file.method = "crumb";
  file.model = "sample";
  file.rope = "theta=1e6";
  file.layers = 2;
  file.kv_heads = 3;
  file.q_heads = 6;
  file.head_dim = 4;
  file.positions = 4096;
  file.position_blocks = 5;
  file.pages_per_position_block = 7;
  file.tokens = 32768;
  file.clip_k = 0.92f;
  file.clip_v = 0.9f;
  float next = 0.25f;
  const auto fill = [&next](size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = next += 0.5f;
    return values;
  };
  file.rotation_k = fill(2 * 3 * 16);
  file.rotation_v = fill(2 * 3 * 16);
  file.mean_k = fill(2 * 3 * 5 * 4);
  file.mean_v = fill(2 * 3 * 4);
  file.feedback_k = fill(2 * 3 * 16);
  file.shift = fill(2 * 6);
  return file;
}

TEST_F(RotationFileTest, ReadsWhatWasWritten) {
  const RotationFile file = Sample();
  ASSERT_TRUE(WriteRotationFile(file, Path()).ok());
  EXPECT_EQ(FilesInFolder(), 1u);
  const auto read = ReadRotationFile(Path());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(RotationDigest(*read), RotationDigest(file));
  EXPECT_EQ(read->method, "crumb");
  EXPECT_EQ(read->model, "sample");
  EXPECT_EQ(read->positions, 4096);
  EXPECT_EQ(read->pages_per_position_block, 7);
  EXPECT_EQ(read->clip_v, 0.9f);
  EXPECT_EQ(read->mean_k, file.mean_k);
  EXPECT_EQ(read->shift, file.shift);
  EXPECT_TRUE(read->feedback_v.empty());
}

TEST_F(RotationFileTest, DigestDependsOnEveryField) {
  const std::string digest = RotationDigest(Sample());
  RotationFile other = Sample();
  other.positions = 8192;
  EXPECT_NE(RotationDigest(other), digest);
  other = Sample();
  other.shift[3] += 0.5f;
  EXPECT_NE(RotationDigest(other), digest);
  other = Sample();
  std::swap(other.rotation_k, other.rotation_v);
  EXPECT_NE(RotationDigest(other), digest);
}

// The expected digests come from another program, which follows docs/formats/rotation.md.
TEST_F(RotationFileTest, DualsAreInTheDigestAndFilesWithoutThemKeepTheirs) {
  RotationFile file = Sample();
  EXPECT_EQ(RotationDigest(file),
            "6c4a1271d9cf2b443cf5390d60d8d67221ba99afe921aa79014fcb7266a38079");
  float next = file.shift.back();
  for (std::vector<float>* dual : {&file.dual_k, &file.dual_v}) {
    for (int i = 0; i < 2 * 3 * 16; ++i) dual->push_back(next += 0.5f);
  }
  EXPECT_EQ(RotationDigest(file),
            "b54bd1d6500e56f0ad6abf6562b95c1a9b4ea6410e46beee26f7c8b667e2e466");
  ASSERT_TRUE(WriteRotationFile(file, Path()).ok());
  const auto read = ReadRotationFile(Path());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->dual_k, file.dual_k);
  EXPECT_EQ(read->dual_v, file.dual_v);
  EXPECT_EQ(read->rotation_k, file.rotation_k);
  EXPECT_EQ(read->mean_v, file.mean_v);
}

TEST_F(RotationFileTest, ADualWithoutItsRotationIsRefused) {
  RotationFile file = Sample();
  file.dual_v = file.rotation_v;
  file.rotation_v.clear();
  const absl::Status status = WriteRotationFile(file, Path());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("dual_v without rotation_v"));
  EXPECT_EQ(FilesInFolder(), 0u);
}

// Pages do not depend on it, and files with and without it are the same rotation.
TEST_F(RotationFileTest, TheExpectedAttentionErrorIsOptionalAndNotInTheDigest) {
  RotationFile file = Sample();
  EXPECT_TRUE(file.attention_error.empty());
  file.attention_error = {0.25f, 0.5f, 0.75f, 0.3f, 0.4f, 1.5f};
  EXPECT_EQ(RotationDigest(file), RotationDigest(Sample()));
  ASSERT_TRUE(WriteRotationFile(file, Path()).ok());
  const auto read = ReadRotationFile(Path());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->attention_error, file.attention_error);
  EXPECT_EQ(read->mean_k, file.mean_k);

  ASSERT_TRUE(WriteRotationFile(Sample(), Path()).ok());
  EXPECT_TRUE(ReadRotationFile(Path())->attention_error.empty());
}

TEST_F(RotationFileTest, AnExpectedAttentionErrorThatCannotBeIsRefused) {
  for (const float bad : {0.0f, -0.25f, 2.5f}) {
    RotationFile file = Sample();
    file.attention_error.assign(6, 0.25f);
    file.attention_error[4] = bad;
    const absl::Status status = WriteRotationFile(file, Path());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("attention_error"));
    EXPECT_EQ(FilesInFolder(), 0u);
  }
  // A file that has the array nevertheless, as its first one, is refused as well.
  RotationFile file = Sample();
  file.attention_error.assign(6, 0.25f);
  ASSERT_TRUE(WriteRotationFile(file, Path()).ok());
  std::string bytes = Bytes();
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  for (const float bad : {0.0f, 3.0f, std::numeric_limits<float>::quiet_NaN()}) {
    std::memcpy(bytes.data() + sizeof(header) + header, &bad, sizeof(bad));
    Write(bytes);
    const absl::Status status = ReadRotationFile(Path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("attention_error"));
  }
}

TEST_F(RotationFileTest, WrongArraysAreNotWritten) {
  RotationFile file = Sample();
  file.mean_v.pop_back();
  const absl::Status status = WriteRotationFile(file, Path());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("mean_v"));
  EXPECT_EQ(FilesInFolder(), 0u);
}

TEST_F(RotationFileTest, EveryTruncationIsAnError) {
  ASSERT_TRUE(WriteRotationFile(Sample(), Path()).ok());
  const std::string bytes = Bytes();
  for (size_t size = 0; size < bytes.size(); size += 37) {
    Write(bytes.substr(0, size));
    EXPECT_FALSE(ReadRotationFile(Path()).ok()) << size;
  }
}

TEST_F(RotationFileTest, EveryFlippedBitOfTheArraysIsFound) {
  ASSERT_TRUE(WriteRotationFile(Sample(), Path()).ok());
  const std::string bytes = Bytes();
  const size_t data = bytes.find('}', bytes.find("shift")) + 1;
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    std::string damaged = bytes;
    const size_t at = i % 2 == 0 ? data + random() % (bytes.size() - data) : random() % data;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << random() % 8));
    Write(damaged);
    const auto read = ReadRotationFile(Path());
    // A flip inside padding or in the case of a hexadecimal digit may change nothing.
    if (read.ok()) {
      EXPECT_EQ(RotationDigest(*read), RotationDigest(Sample())) << at;
    }
  }
}

TEST_F(RotationFileTest, ErrorsNameFileAndField) {
  ASSERT_TRUE(WriteRotationFile(Sample(), Path()).ok());
  const std::string bytes = Bytes();
  const auto status_with = [&](const std::string& from, const std::string& to) {
    std::string changed = bytes;
    changed.replace(changed.find(from), from.size(), to);
    Write(changed);
    return std::string(ReadRotationFile(Path()).status().message());
  };
  EXPECT_THAT(status_with("\"version\":\"1\"", "\"version\":\"9\""), HasSubstr("version 9"));
  EXPECT_THAT(status_with("\"layers\":\"2\"", "\"layers\":\"x\""), HasSubstr("layers"));
  EXPECT_THAT(status_with("\"kv_heads\":\"3\"", "\"kv_heads\":\"4\""), HasSubstr("feedback_k"));
  EXPECT_THAT(status_with("\"clip_k\"", "\"clip_x\""), HasSubstr("clip_k is missing"));
  EXPECT_THAT(status_with("\"tokens\":\"32768\"", "\"tokens\":\"32769\""), HasSubstr("digest"));
  EXPECT_THAT(status_with("\"tokens\":\"32768\"", "\"tokens\":\"32769\""), HasSubstr(Path()));
}

}  // namespace
}  // namespace crumb
