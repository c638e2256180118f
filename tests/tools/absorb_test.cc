// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <cmath>
#include <filesystem>
#include <random>

#include "calibration/calibrator.h"
#include "calibration/eigenbasis.h"
#include "calibration/linear_weight.h"
#include "common/json_file.h"
#include "common/rotation_file.h"
#include "common/safetensors.h"
#include "tests/common/temporary_folder.h"
#include "tests/tools/tensor_file.h"

namespace crumb::tools {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int kLayers = 3, kQHeads = 4, kKvHeads = 2, kHeadDim = 16, kHidden = 48;

// The form in which projections are stored.
struct Storage {
  const char* name;
  const char* dtype;
  int scales;  // scales of FP8: 0, 1, or -1 for one per row
  double error;
};

std::ostream& operator<<(std::ostream& out, const Storage& storage) { return out << storage.name; }

class AbsorbTest : public testing::Test {
 protected:
  AbsorbTest() : storage_{"bf16", "BF16", 0, 1e-2} {}

  std::string ModelDir() const { return folder_.File("model"); }
  std::string OutDir() const { return folder_.File("out"); }
  AbsorbCommand Command() const { return {ModelDir(), folder_.File("rotation"), OutDir()}; }

  std::vector<float> Random(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  void AddProjection(const std::string& name, int64_t rows, int64_t columns, TensorFile& file) {
    const int64_t scales = storage_.scales < 0 ? rows : storage_.scales;
    file.Add(name + ".weight", storage_.dtype, {rows, columns}, Random(rows * columns));
    if (scales == 0) return;
    std::vector<float> scale(scales);
    for (float& value : scale) value = 0.01f * static_cast<float>(1 + random_() % 5);
    const std::vector<int64_t> shape =
        scales == 1 ? std::vector<int64_t>{} : std::vector<int64_t>{rows, 1};
    file.Add(name + ".weight_scale", "F32", shape, scale);
  }

  // Writes two shards that share layers, with biases and with unrelated tensors and files.
  void WriteModel() {
    fs::create_directories(ModelDir() + "/extra");
    TensorFile shards[2];
    nlohmann::json map;
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string base = "model.layers." + std::to_string(layer) + ".self_attn.";
      AddProjection(base + "v_proj", kKvHeads * kHeadDim, kHidden, shards[layer % 2]);
      shards[layer % 2].Add(base + "v_proj.bias", "F32", {kKvHeads * kHeadDim},
                            Random(kKvHeads * kHeadDim));
      AddProjection(base + "o_proj", kHidden, kQHeads * kHeadDim, shards[1]);
    }
    shards[0].Add("model.norm.weight", "BF16", {kHidden}, Random(kHidden));
    shards[1].AddPositions("model.something", {1, 2, 3});
    for (int i = 0; i < 2; ++i) {
      for (const auto& [name, entry] : shards[i].tensors) map[name] = Shard(i);
      shards[i].Write(ModelDir() + "/" + Shard(i));
    }
    Write("model.safetensors.index.json", nlohmann::json({{"weight_map", map}}).dump());
    Write("config.json", Config().dump());
    Write("extra/notes.txt", "kept as it is");
  }

  void WriteRotation(int head_dim = kHeadDim) {
    RotationFile file;
    file.method = "crumb";
    file.layers = kLayers;
    file.kv_heads = kKvHeads;
    file.head_dim = head_dim;
    for (int i = 0; i < kLayers * kKvHeads; ++i) {
      const std::vector<float> values = Random(2 * head_dim * head_dim);
      const Eigen::MatrixXd rows =
          Eigen::Map<const RowMajor>(values.data(), 2 * head_dim, head_dim).cast<double>();
      const RowMajor rotation =
          calibration::MakeEigenbasis(rows.transpose() * rows).rotation.cast<float>();
      file.rotation_v.insert(file.rotation_v.end(), rotation.data(),
                             rotation.data() + rotation.size());
    }
    file.rotation_k = file.rotation_v;
    file.mean_v = Random(kLayers * kKvHeads * head_dim);
    ASSERT_TRUE(WriteRotationFile(file, folder_.File("rotation")).ok());
  }

  static std::string Shard(int i) { return "model-0000" + std::to_string(i) + ".safetensors"; }
  static nlohmann::json Config() {
    return {{"num_hidden_layers", kLayers},
            {"num_attention_heads", kQHeads},
            {"num_key_value_heads", kKvHeads},
            {"head_dim", kHeadDim},
            {"hidden_size", kHidden}};
  }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(ModelDir() + "/" + name, std::ios::binary | std::ios::trunc) << text;
  }
  static std::string Read(const std::string& path) {
    const auto text = ReadFile(path, 1 << 30);
    EXPECT_TRUE(text.ok()) << text.status();
    return text.value_or("");
  }

  // Returns a projection of `dir` in double precision.
  Eigen::MatrixXd Weight(const std::string& dir, int shard, const std::string& name) const {
    const auto file = SafetensorsFile::Open(dir + "/" + Shard(shard));
    EXPECT_TRUE(file.ok()) << file.status();
    const auto weight = (*file)->FindRaw(name + ".weight");
    EXPECT_TRUE(weight.ok()) << weight.status();
    const auto scale = (*file)->FindRaw(name + ".weight_scale");
    const auto linear = calibration::DecodeWeight(*weight, scale.ok() ? &scale.value() : nullptr);
    EXPECT_TRUE(linear.ok()) << linear.status();
    return linear->values.cast<double>();
  }
  Eigen::VectorXd Bias(const std::string& dir, int shard, const std::string& name) const {
    const auto file = SafetensorsFile::Open(dir + "/" + Shard(shard));
    const auto bias = (*file)->Find(name + ".bias");
    EXPECT_TRUE(bias.ok()) << bias.status();
    Eigen::VectorXf values(bias->bytes.size() / sizeof(float));
    std::memcpy(values.data(), bias->bytes.data(), bias->bytes.size());
    return values.cast<double>();
  }

  std::string ErrorOf(const AbsorbCommand& command) const {
    const CommandResult result = RunAbsorb(command, nullptr);
    EXPECT_FALSE(result.status.ok());
    std::vector<std::string> left;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      const std::string name = entry.path().filename().string();
      if (name != "model" && name != "rotation") left.push_back(name);
    }
    EXPECT_THAT(left, testing::IsEmpty());
    return std::string(result.status.message());
  }

  const TemporaryFolder folder_;
  Storage storage_;
  std::mt19937 random_{7};
};

class AbsorbStorageTest : public AbsorbTest, public testing::WithParamInterface<Storage> {};

INSTANTIATE_TEST_SUITE_P(Storages, AbsorbStorageTest,
                         testing::Values(Storage{"f32", "F32", 0, 1e-6},
                                         Storage{"f16", "F16", 0, 2e-3},
                                         Storage{"bf16", "BF16", 0, 1e-2},
                                         Storage{"fp8_channel", "F8_E4M3", -1, 6e-2},
                                         Storage{"fp8_tensor", "F8_E4M3", 1, 8e-2}),
                         [](const auto& storage) { return std::string(storage.param.name); });

// Returns each query head's product of both projections, and the values, in double precision.
TEST_P(AbsorbStorageTest, OutputsStayAndValuesArriveRotated) {
  storage_ = GetParam();
  WriteModel();
  WriteRotation();
  double last = 0.0;
  const CommandResult result = RunAbsorb(Command(), [&last](double done) {
    EXPECT_GE(done, last);
    last = done;
  });
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(last, 1.0);
  EXPECT_EQ(result.json["weights"], storage_.dtype);
  ASSERT_EQ(result.json["errors"].size(), static_cast<size_t>(kLayers));
  const auto file = ReadRotationFile(folder_.File("rotation"));
  ASSERT_TRUE(file.ok());
  double most = 0.0;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string base = "model.layers." + std::to_string(layer) + ".self_attn.";
    const Eigen::MatrixXd v = Weight(ModelDir(), layer % 2, base + "v_proj");
    const Eigen::MatrixXd o = Weight(ModelDir(), 1, base + "o_proj");
    const Eigen::MatrixXd v_new = Weight(OutDir(), layer % 2, base + "v_proj");
    const Eigen::MatrixXd o_new = Weight(OutDir(), 1, base + "o_proj");
    const Eigen::VectorXd b = Bias(ModelDir(), layer % 2, base + "v_proj");
    const Eigen::VectorXd b_new = Bias(OutDir(), layer % 2, base + "v_proj");
    for (int head = 0; head < kQHeads; ++head) {
      const int kv = head / (kQHeads / kKvHeads) * kHeadDim, q = head * kHeadDim;
      const Eigen::MatrixXd before = o.middleCols(q, kHeadDim) * v.middleRows(kv, kHeadDim);
      const Eigen::MatrixXd after = o_new.middleCols(q, kHeadDim) * v_new.middleRows(kv, kHeadDim);
      most = std::max(most, (before - after).norm() / before.norm());
      const Eigen::VectorXd bias = o.middleCols(q, kHeadDim) * b.segment(kv, kHeadDim);
      EXPECT_LE((o_new.middleCols(q, kHeadDim) * b_new.segment(kv, kHeadDim) - bias).norm(),
                3 * storage_.error * bias.norm());
      const Eigen::MatrixXd r =
          Eigen::Map<const RowMajor>(
              &file->rotation_v[(layer * kKvHeads * kHeadDim + kv) * kHeadDim], kHeadDim, kHeadDim)
              .cast<double>();
      EXPECT_LE(
          (r.transpose() * v.middleRows(kv, kHeadDim) - v_new.middleRows(kv, kHeadDim)).norm(),
          storage_.error * v.norm());
    }
  }
  EXPECT_LE(most, storage_.error);
  EXPECT_NEAR(result.json["max_error"], most, storage_.error);
}

TEST_F(AbsorbTest, EverythingElseIsKeptAndTheRotationFileFits) {
  WriteModel();
  WriteRotation();
  ASSERT_TRUE(RunAbsorb(Command(), nullptr).status.ok());
  for (const char* name : {"config.json", "model.safetensors.index.json", "extra/notes.txt"}) {
    EXPECT_EQ(Read(ModelDir() + "/" + name), Read(OutDir() + "/" + name));
  }
  for (int i = 0; i < 2; ++i) {
    const auto before = SafetensorsFile::Open(ModelDir() + "/" + Shard(i));
    const auto after = SafetensorsFile::Open(OutDir() + "/" + Shard(i));
    ASSERT_TRUE(before.ok() && after.ok()) << after.status();
    EXPECT_EQ((*before)->names(), (*after)->names());
    for (const std::string& name : (*before)->names()) {
      const auto old_bytes = (*before)->FindRaw(name)->bytes;
      const auto new_bytes = (*after)->FindRaw(name)->bytes;
      EXPECT_EQ(std::equal(old_bytes.begin(), old_bytes.end(), new_bytes.begin()),
                name.find("self_attn") == std::string::npos)
          << name;
    }
  }
  const auto file = ReadRotationFile(folder_.File("rotation"));
  const auto absorbed = ReadRotationFile(OutDir() + "/" + kAbsorbedRotationFile);
  ASSERT_TRUE(file.ok() && absorbed.ok()) << absorbed.status();
  EXPECT_EQ(absorbed->v_basis, "rotated");
  EXPECT_TRUE(absorbed->rotation_v.empty());
  EXPECT_EQ(absorbed->rotation_k, file->rotation_k);
  EXPECT_NE(RotationDigest(*absorbed), RotationDigest(*file));
  for (int at = 0; at < kLayers * kKvHeads; ++at) {
    for (int c = 0; c < kHeadDim; ++c) {
      double expected = 0.0;
      for (int i = 0; i < kHeadDim; ++i) {
        expected += double{file->mean_v[at * kHeadDim + i]} *
                    file->rotation_v[(at * kHeadDim + i) * kHeadDim + c];
      }
      EXPECT_NEAR(absorbed->mean_v[at * kHeadDim + c], expected, 1e-6);
    }
  }
  // An absorbed model cannot be absorbed again.
  AbsorbCommand again = Command();
  again.model = OutDir();
  again.out = folder_.File("again");
  EXPECT_THAT(std::string(RunAbsorb(again, nullptr).status.message()), HasSubstr("already"));
  again = Command();
  EXPECT_EQ(RunAbsorb(again, nullptr).status.code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(AbsorbTest, BlockFp8IsRefusedWithAReason) {
  storage_ = {"fp8", "F8_E4M3", 1, 0};
  WriteModel();
  WriteRotation();
  const auto path = ModelDir() + "/" + Shard(1);
  TensorFile file;
  file.Add("model.layers.0.self_attn.v_proj.weight", "F8_E4M3", {kKvHeads * kHeadDim, kHidden},
           Random(kKvHeads * kHeadDim * kHidden));
  file.Add("model.layers.0.self_attn.v_proj.weight_scale_inv", "F32", {2, 3}, Random(6));
  file.Write(ModelDir() + "/model.safetensors");
  fs::remove(ModelDir() + "/model.safetensors.index.json");
  EXPECT_THAT(ErrorOf(Command()),
              testing::AllOf(HasSubstr("v_proj.weight_scale_inv"), HasSubstr("per block")));
}

TEST_F(AbsorbTest, MissingShardsAndTensorsAreNamed) {
  WriteModel();
  WriteRotation();
  fs::rename(ModelDir() + "/" + Shard(1), ModelDir() + "/away");
  EXPECT_THAT(ErrorOf(Command()), testing::AllOf(HasSubstr(Shard(1)), HasSubstr("tensor model.")));
  TensorFile few;
  few.Add("model.layers.0.self_attn.v_proj.weight", "BF16", {kKvHeads * kHeadDim, kHidden},
          Random(kKvHeads * kHeadDim * kHidden));
  few.Write(ModelDir() + "/model.safetensors");
  fs::remove(ModelDir() + "/model.safetensors.index.json");
  EXPECT_THAT(ErrorOf(Command()), HasSubstr("model.layers.0.self_attn.o_proj.weight"));
  few.Add("model.layers.0.self_attn.o_proj.weight", "BF16", {kHidden, 8}, Random(kHidden * 8));
  few.Write(ModelDir() + "/model.safetensors");
  EXPECT_THAT(ErrorOf(Command()), HasSubstr("o_proj.weight: shape [48, 8]"));
  fs::resize_file(ModelDir() + "/model.safetensors", 100);
  EXPECT_THAT(ErrorOf(Command()), HasSubstr("model.safetensors"));
}

TEST_F(AbsorbTest, ARotationOfAnotherGeometryIsRefused) {
  WriteModel();
  WriteRotation(8);
  EXPECT_THAT(ErrorOf(Command()),
              testing::AllOf(HasSubstr("rotation is for 3 layers"), HasSubstr("head_dim 8")));
  const auto hadamard = calibration::HadamardRotations(kHeadDim);
  RotationFile only_k = *hadamard;
  only_k.rotation_v.clear();
  ASSERT_TRUE(WriteRotationFile(only_k, folder_.File("rotation")).ok());
  EXPECT_THAT(ErrorOf(Command()), HasSubstr("nothing to absorb"));
  // One rotation for all layers and heads fits any number of them.
  ASSERT_TRUE(WriteRotationFile(*hadamard, folder_.File("rotation")).ok());
  EXPECT_TRUE(RunAbsorb(Command(), nullptr).status.ok());
}

TEST_F(AbsorbTest, ModelsThatARotationDoesNotPassAreRefused) {
  WriteModel();
  WriteRotation();
  nlohmann::json gated = Config();
  gated["attn_output_gate"] = true;
  Write("config.json", gated.dump());
  EXPECT_THAT(ErrorOf(Command()), HasSubstr("attn_output_gate"));
  Write("config.json", Config().dump());
  TensorFile norm;
  norm.Add("model.layers.0.self_attn.v_norm.weight", "BF16", {kHeadDim}, Random(kHeadDim));
  norm.Add("model.layers.0.self_attn.v_proj.weight", "BF16", {kKvHeads * kHeadDim, kHidden},
           Random(kKvHeads * kHeadDim * kHidden));
  norm.Write(ModelDir() + "/model.safetensors");
  fs::remove(ModelDir() + "/model.safetensors.index.json");
  EXPECT_THAT(ErrorOf(Command()), HasSubstr("v_norm"));
}

TEST_F(AbsorbTest, ValuesThatAreNotFiniteAreNamedAndTheDraftGoes) {
  WriteModel();
  WriteRotation();
  std::string bytes = Read(ModelDir() + "/" + Shard(0));
  const auto file = SafetensorsFile::Open(ModelDir() + "/" + Shard(0));
  ASSERT_TRUE(file.ok());
  const auto raw = (*file)->FindRaw("model.layers.2.self_attn.v_proj.weight");
  ASSERT_TRUE(raw.ok());
  bytes.replace(raw->file_offset, 2, "\xc0\x7f");
  Write(Shard(0), bytes);
  EXPECT_THAT(ErrorOf(Command()),
              testing::AllOf(HasSubstr(Shard(0)), HasSubstr("layers.2"), HasSubstr("not finite")));
}

}  // namespace
}  // namespace crumb::tools
