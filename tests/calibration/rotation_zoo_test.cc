// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/rotation_zoo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <random>

#include "calibration/calibrator.h"
#include "calibration/zip_archive.h"
#include "tests/common/temporary_folder.h"

namespace crumb::calibration {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using namespace std::string_literals;

constexpr char kGoldenV1[] = "tests/calibration/fixtures/torch_v1.pt";
constexpr char kGoldenV2[] = "tests/calibration/fixtures/torch_v2.pt";

const std::vector<float> kHadamard = {.5f, .5f, .5f,  .5f,  .5f, -.5f, .5f,  -.5f,
                                      .5f, .5f, -.5f, -.5f, .5f, -.5f, -.5f, .5f};
const std::vector<float> kPermutation = {0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0};

std::vector<float> Together(std::vector<float> a, const std::vector<float>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Returns the bytes of a torch file of one layer with a [2, 2] rotation, for tests to damage.
struct TorchParts {
  std::string version = "K\x01";
  std::string layer_key = "K\x05";
  std::string layer_id = "K\x05";
  std::string type = "FloatStorage";
  std::string elements = "K\x04";
  std::string offset = "K\x00"s;
  std::string shape = "K\x02K\x02\x86";
  std::string strides = "K\x02K\x01\x86";
  std::string extra = "";  // opcodes before STOP
  std::vector<float> values = {0, 1, -1, 0};

  static std::string Text(const std::string& text) {
    return "X"s + static_cast<char>(text.size()) + "\0\0\0"s + text;
  }
  std::string Pickle() const {
    return "\x80\x02}("s + Text("format_version") + version + Text("layers") + "}(" + layer_key +
           "}(" + Text("layer_id") + layer_id + Text("rotation") +
           "ctorch._utils\n_rebuild_tensor_v2\n((" + Text("storage") + "ctorch\n" + type + "\n" +
           Text("0") + Text("cpu") + elements + "tQ" + offset + shape + strides +
           "\x89"
           "ccollections\nOrderedDict\n)RtRuuu" +
           extra + ".";
  }
};

class RotationZooTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.File(name); }

  void Write(const TorchParts& parts) const {
    std::ofstream out(Path("bent.pt"), std::ios::binary | std::ios::trunc);
    ZipWriter zip(out);
    zip.Add("x/data.pkl", parts.Pickle());
    zip.Add("x/data/0", std::as_bytes(std::span(parts.values)));
    zip.Finish();
  }
  std::string ErrorOf(const TorchParts& parts) const {
    Write(parts);
    const auto read = ReadRotationZoo(Path("bent.pt"));
    EXPECT_FALSE(read.ok());
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(Path("bent.pt")));
    return std::string(read.status().message());
  }

  const TemporaryFolder folder_;
};

TEST_F(RotationZooTest, ReadsWhatPyTorchWrote) {
  const auto v1 = ReadRotationZoo(kGoldenV1);
  ASSERT_TRUE(v1.ok()) << v1.status();
  EXPECT_EQ(v1->objective, "qqt_r_h_pbr");
  EXPECT_EQ(v1->format_version, 1);
  EXPECT_THAT(v1->layer_ids, ElementsAre(3, 7));
  EXPECT_EQ(v1->kv_heads, 1);
  EXPECT_EQ(v1->head_dim, 4);
  EXPECT_EQ(v1->rotation, Together(kHadamard, kPermutation));
  EXPECT_THAT(v1->eigenvalues, ElementsAre(3, 4, 5, 6, 7, 8, 9, 10));
  const auto v2 = ReadRotationZoo(kGoldenV2);
  ASSERT_TRUE(v2.ok()) << v2.status();
  EXPECT_EQ(v2->format_version, 2);
  EXPECT_THAT(v2->layer_ids, ElementsAre(3, 7));
  EXPECT_EQ(v2->kv_heads, 2);
  EXPECT_EQ(v2->rotation,
            Together(Together(kHadamard, kPermutation), Together(kPermutation, kHadamard)));
  EXPECT_TRUE(v2->eigenvalues.empty());
  EXPECT_EQ(SideOf(*v1, "any.pt"), Side::kKeys);
  EXPECT_EQ(SideOf(*v2, "any.pt"), Side::kValues);
}

TEST_F(RotationZooTest, BothSidesMakeARotationFile) {
  const auto k = ReadRotationZoo(kGoldenV1), v = ReadRotationZoo(kGoldenV2);
  ASSERT_TRUE(k.ok() && v.ok());
  const auto file = FromRotationZoo(&*k, &*v);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->method, "oscar");
  EXPECT_EQ(file->layers, 2);
  EXPECT_EQ(file->kv_heads, 2);  // K's are repeated for V's two heads
  EXPECT_THAT(file->layer_ids, ElementsAre(3, 7));
  EXPECT_FLOAT_EQ(file->clip_k, 0.96f);
  const std::vector<float> twice =
      Together(Together(kHadamard, kHadamard), Together(kPermutation, kPermutation));
  EXPECT_EQ(file->rotation_k, twice);
  EXPECT_EQ(file->rotation_v, v->rotation);
  // The rotations survive the conversion to a rotation file and back.
  ASSERT_TRUE(WriteRotationFile(*file, Path("ours")).ok());
  const auto ours = ReadRotationFile(Path("ours"));
  ASSERT_TRUE(ours.ok()) << ours.status();
  const auto back = ToRotationZoo(*ours, Side::kValues, 2, 0, 0);
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_TRUE(WriteRotationZoo(*back, Path("back.pt")).ok());
  const auto again = ReadRotationZoo(Path("back.pt"));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->rotation, v->rotation);
  EXPECT_EQ(again->layer_ids, v->layer_ids);
  EXPECT_EQ(again->objective, "sst_r_h_pbr");
  EXPECT_THAT(std::string(ToRotationZoo(*ours, Side::kKeys, 1, 0, 0).status().message()),
              HasSubstr("use v2"));
}

TEST_F(RotationZooTest, AFileForAllLayersIsRepeated) {
  const auto hadamard = HadamardRotations(4);
  ASSERT_TRUE(hadamard.ok());
  const auto zoo = ToRotationZoo(*hadamard, Side::kKeys, 2, 3, 2);
  ASSERT_TRUE(zoo.ok()) << zoo.status();
  ASSERT_TRUE(WriteRotationZoo(*zoo, Path("h.pt")).ok());
  const auto read = ReadRotationZoo(Path("h.pt"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT(read->layer_ids, ElementsAre(0, 1, 2));
  EXPECT_EQ(read->kv_heads, 2);
  EXPECT_EQ(read->objective, "hadamard");
  for (int i = 0; i < 6; ++i) {
    EXPECT_THAT(std::vector<float>(&read->rotation[i * 16], &read->rotation[i * 16] + 16),
                ElementsAreArray(kHadamard));
  }
  const auto file = FromRotationZoo(&*read, nullptr);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->method, "hadamard");
  EXPECT_TRUE(file->layer_ids.empty());
  EXPECT_TRUE(file->rotation_v.empty());
}

TEST_F(RotationZooTest, SidesThatDoNotFitAreRefused) {
  const auto k = ReadRotationZoo(kGoldenV1);
  ASSERT_TRUE(k.ok());
  RotationZooFile other = *k;
  other.layer_ids = {3, 8};
  EXPECT_FALSE(FromRotationZoo(&*k, &other).ok());
  other = *k;
  other.head_dim = 2;
  EXPECT_FALSE(FromRotationZoo(&*k, &other).ok());
  EXPECT_FALSE(FromRotationZoo(nullptr, nullptr).ok());
}

TEST_F(RotationZooTest, TheBentFileIsGoodUnbent) {
  Write({});
  const auto read = ReadRotationZoo(Path("bent.pt"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT(read->rotation, ElementsAre(0, 1, -1, 0));
  EXPECT_THAT(read->layer_ids, ElementsAre(5));
}

TEST_F(RotationZooTest, BadContentsAreNamed) {
  EXPECT_THAT(ErrorOf({.version = "K\x03"}), HasSubstr("format_version"));
  EXPECT_THAT(ErrorOf({.layer_key = TorchParts::Text("five")}), HasSubstr("\"five\""));
  EXPECT_THAT(ErrorOf({.layer_key = "J\xff\xff\xff\xff"}), HasSubstr("key -1"));
  EXPECT_THAT(ErrorOf({.layer_id = "K\x06"}), HasSubstr("layer 5: its layer_id"));
  EXPECT_THAT(ErrorOf({.type = "LongStorage"}), HasSubstr("torch LongStorage"));
  EXPECT_THAT(ErrorOf({.elements = "K\x09"}), HasSubstr("entry x/data/0"));
  EXPECT_THAT(ErrorOf({.offset = "K\x01"}), HasSubstr("beyond its storage"));
  EXPECT_THAT(ErrorOf({.offset = "J\xff\xff\xff\xff"}), HasSubstr("layer 5: tensor rotation"));
  EXPECT_THAT(ErrorOf({.shape = "K\x04K\x01\x86", .strides = "K\x01K\x01\x86"}),
              HasSubstr("[4, 1]"));
  EXPECT_THAT(ErrorOf({.shape = "J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"}),
              HasSubstr("a size that is not read"));
  EXPECT_THAT(ErrorOf({.strides = "K\x01K\x02\x86"}), HasSubstr("not contiguous"));
  EXPECT_THAT(ErrorOf({.strides = "K\x00K\x00\x86"s}), HasSubstr("not contiguous"));
  EXPECT_THAT(ErrorOf({.values = {0, 1, -1, 0.01f}}), HasSubstr("layer 5: tensor rotation"));
  EXPECT_THAT(ErrorOf({.values = {0, 1, -1, NAN}}), HasSubstr("no rotation"));
  EXPECT_THAT(ErrorOf({.extra = "cos\nsystem\n"}), HasSubstr("os system"));
}

TEST_F(RotationZooTest, EveryTruncationIsAnErrorAndNoFlippedByteCrashes) {
  std::ifstream in(kGoldenV1, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(in), {});
  const auto put = [&](const std::string& contents) {
    std::ofstream(Path("cut.pt"), std::ios::binary | std::ios::trunc) << contents;
  };
  for (size_t size = 0; size < bytes.size(); ++size) {
    put(bytes.substr(0, size));
    EXPECT_FALSE(ReadRotationZoo(Path("cut.pt")).ok()) << size;
  }
  std::mt19937 random(13);
  for (int round = 0; round < 1000; ++round) {
    std::string flipped = bytes;
    flipped[random() % flipped.size()] = static_cast<char>(random());
    put(flipped);
    const auto read = ReadRotationZoo(Path("cut.pt"));
    if (read.ok()) {
      EXPECT_EQ(read->rotation, Together(kHadamard, kPermutation));
    }
  }
  EXPECT_EQ(ReadRotationZoo(Path("none.pt")).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace crumb::calibration
