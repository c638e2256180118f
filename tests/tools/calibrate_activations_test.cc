// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "common/rotation_file.h"
#include "tests/common/temporary_folder.h"
#include "tests/tools/tensor_file.h"
#include "tools/activations.h"
#include "tools/commands.h"

namespace crumb::tools {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kModel[] = "models/data/tiny-lm";
constexpr int kContext = 512, kTokens = 1536, kTensorsPerFile = 2;

std::vector<float> Floats(const kernels::Bf16* values, size_t count) {
  std::vector<float> floats(count);
  for (size_t i = 0; i < count; ++i) floats[i] = kernels::Bf16ToFloat(values[i]);
  return floats;
}

class CalibrateActivationsTest : public testing::Test {
 protected:
  // Writes the activations of the model for a text, as files of two sequences each.
  void DumpModel(const std::string& dtype) {
    const auto source = ModelActivations::Open({.model = kModel,
                                                .texts = {"LICENSE"},
                                                .context = kContext,
                                                .tokens = kTokens,
                                                .threads = 1});
    ASSERT_TRUE(source.ok()) << source.status();
    std::vector<int> seen((*source)->shape().layers, 0);
    std::map<std::string, std::vector<float>> parts[2];
    ASSERT_TRUE(
        (*source)
            ->ForEach(0, 4,
                      [&](const calibration::SequenceActivations& s) {
                        auto& to = parts[seen[s.layer]++ / kTensorsPerFile];
                        const std::string base = "layers." + std::to_string(s.layer);
                        const auto add = [&](const char* part, const auto* rows, int heads) {
                          const auto values = Floats(rows, size_t{1} * kContext * heads * 128);
                          auto& all = to[base + part];
                          all.insert(all.end(), values.begin(), values.end());
                        };
                        add(".q", s.q, 4);
                        add(".k", s.k, 2);
                        add(".v", s.v, 2);
                        return absl::OkStatus();
                      })
            .ok());
    for (int i = 0; i < 2; ++i) {
      TensorFile& file = files_[i];
      const int sequences = i == 0 ? 2 : 1;
      for (const auto& [name, values] : parts[i]) {
        file.Add(name, dtype, {sequences * kContext, name.back() == 'q' ? 4 : 2, 128}, values);
      }
      std::vector<int64_t> positions;
      for (int t = 0; t < sequences * kContext; ++t) positions.push_back(t % kContext);
      file.AddPositions("positions", positions, i == 0 ? "I64" : "I32");
      file.metadata = {{"rope_theta", "1000000.0"}, {"model", "tiny-lm"}};
    }
  }

  // Returns random rows of a small model: 2 layers, 2 query heads, 1 KV head, head_dim 64.
  void MakeSmall(int tokens) {
    files_[0] = {};
    for (const char* name :
         {"layers.0.q", "layers.1.q", "layers.0.k", "layers.1.k", "layers.0.v", "layers.1.v"}) {
      const int heads = std::string(name).back() == 'q' ? 2 : 1;
      std::vector<float> values(size_t{1} * tokens * heads * 64);
      for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(0.37f * i * (1 + i % 7));
      files_[0].Add(name, "F32", {tokens, heads, 64}, values);
    }
    std::vector<int64_t> positions(tokens);
    for (int t = 0; t < tokens; ++t) positions[t] = t;
    files_[0].AddPositions("positions", positions);
  }

  std::string FilePath(int i) const { return folder_.File("a" + std::to_string(i)); }
  std::string Out() const { return folder_.File("out"); }

  CalibrateCommand Command(const std::string& method, int files) const {
    CalibrateCommand command;
    command.method = method;
    command.out = Out();
    command.threads = 1;
    for (int i = 0; i < files; ++i) {
      files_[i].Write(FilePath(i));
      command.activations.push_back(FilePath(i));
    }
    return command;
  }
  CalibrateCommand SmallCommand() const {
    CalibrateCommand command = Command("crumb", 1);
    command.positions = 1024;
    command.rope_theta = 10000;
    return command;
  }
  std::string ErrorOf(const CalibrateCommand& command) const {
    const CommandResult result = RunCalibrate(command, nullptr);
    EXPECT_FALSE(result.status.ok());
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      EXPECT_EQ(entry.path().filename().string()[0], 'a');  // only the input
    }
    return std::string(result.status.message());
  }
  std::string SmallError() const { return ErrorOf(SmallCommand()); }

  const TemporaryFolder folder_;
  TensorFile files_[2];
};

// Activations from files yield the same constants as running the model.
TEST_F(CalibrateActivationsTest, FilesGiveWhatTheModelGives) {
  for (const char* dtype : {"BF16", "F32"}) {
    DumpModel(dtype);
    CalibrateCommand from_files = Command("crumb", 2);
    from_files.positions = 4096;
    from_files.model = kModel;
    from_files.value_hessian = true;
    const CommandResult made = RunCalibrate(from_files, nullptr);
    ASSERT_TRUE(made.status.ok()) << made.status;
    EXPECT_TRUE(RunRotationVerify({Out()}).status.ok());
    CalibrateCommand from_text;
    from_text.model = kModel;
    from_text.texts = {"LICENSE"};
    from_text.out = folder_.File("text");
    from_text.context = kContext;
    from_text.tokens = kTokens;
    from_text.threads = 1;
    const CommandResult reference = RunCalibrate(from_text, nullptr);
    ASSERT_TRUE(reference.status.ok()) << reference.status;
    EXPECT_EQ(made.json["digest"], reference.json["digest"]) << dtype;
  }
}

TEST_F(CalibrateActivationsTest, TheModelFolderGivesRopeAndValueHessians) {
  DumpModel("BF16");
  files_[0].metadata.clear();
  files_[1].metadata.clear();
  CalibrateCommand command = Command("crumb", 2);
  command.model = kModel;
  command.value_hessian = true;
  const CommandResult made = RunCalibrate(command, nullptr);
  ASSERT_TRUE(made.status.ok()) << made.status;
  EXPECT_EQ(made.json["positions"], 4096);
  EXPECT_EQ(made.json["model"], "tiny-lm");
  EXPECT_EQ(made.json["feedback_v"], true);
  const auto file = ReadRotationFile(Out());
  ASSERT_TRUE(file.ok());
  float most = 0.0f;
  for (const float value : file->feedback_v) most = std::max(most, std::abs(value));
  EXPECT_GT(most, 0.1f);
}

// A sequence in two pieces with continuing positions yields the same moments as a cut sequence.
TEST_F(CalibrateActivationsTest, PositionsSayWhereARunIs) {
  MakeSmall(1024);
  ASSERT_TRUE(RunCalibrate(SmallCommand(), nullptr).status.ok());
  const auto whole = ReadRotationFile(Out());
  // The rows are written as two pieces, the later one first.
  TensorFile turned = files_[0];
  for (auto& [name, entry] : turned.tensors) {
    std::rotate(entry.bytes.begin(), entry.bytes.begin() + entry.bytes.size() / 2,
                entry.bytes.end());
  }
  files_[0] = turned;
  ASSERT_TRUE(RunCalibrate(SmallCommand(), nullptr).status.ok());
  const auto pieces = ReadRotationFile(Out());
  ASSERT_TRUE(whole.ok() && pieces.ok());
  EXPECT_EQ(whole->tokens, 1024 - 64);
  EXPECT_EQ(pieces->tokens, 1024 - 64);
  ASSERT_EQ(whole->mean_k.size(), pieces->mean_k.size());
  for (size_t i = 0; i < whole->mean_k.size(); ++i) {
    EXPECT_NEAR(whole->mean_k[i], pieces->mean_k[i], 1e-5);
  }
  for (size_t i = 0; i < whole->covariance_k.size(); ++i) {
    EXPECT_NEAR(whole->covariance_k[i], pieces->covariance_k[i], 1e-4);
  }
}

TEST_F(CalibrateActivationsTest, SparseLayersKeepTheirNumbers) {
  MakeSmall(512);
  files_[0].tensors["layers.7.q"] = files_[0].tensors["layers.1.q"];
  files_[0].tensors["layers.7.k"] = files_[0].tensors["layers.1.k"];
  files_[0].tensors["layers.7.v"] = files_[0].tensors["layers.1.v"];
  EXPECT_THAT(SmallError(), HasSubstr("tensor layers.2.q is missing"));
  CalibrateCommand command = SmallCommand();
  command.layer_ids = {0, 7};
  const CommandResult made = RunCalibrate(command, nullptr);
  ASSERT_TRUE(made.status.ok()) << made.status;
  EXPECT_EQ(made.json["layers"], 2);
  EXPECT_EQ(made.json["layer_ids"], nlohmann::json({0, 7}));
}

TEST_F(CalibrateActivationsTest, BadInputIsNamedAndNothingIsWritten) {
  MakeSmall(512);
  const TensorFile good = files_[0];
  const auto bend = [&](const std::function<void(TensorFile&)>& change) {
    files_[0] = good;
    change(files_[0]);
    return SmallError();
  };
  const auto named = [&](const char* tensor) {
    return AllOf(HasSubstr(FilePath(0)), HasSubstr(tensor));
  };
  EXPECT_THAT(bend([](TensorFile& f) {
                const float nan = NAN;
                f.tensors["layers.1.k"].bytes.replace(4 * (64 * 300 + 5), 4,
                                                      reinterpret_cast<const char*>(&nan), 4);
              }),
              AllOf(named("layers.1.k"), HasSubstr("token 300, head 0"), HasSubstr("not finite")));
  EXPECT_THAT(bend([](TensorFile& f) { f.tensors.erase("layers.1.v"); }), named("layers.1.v"));
  EXPECT_THAT(bend([](TensorFile& f) { f.tensors.erase("positions"); }), named("positions"));
  EXPECT_THAT(bend([](TensorFile& f) {
                f.AddPositions("positions", {1, 2, 3});
              }),
              AllOf(named("layers.0.q"), HasSubstr("[3, 2, 64]")));
  EXPECT_THAT(bend([](TensorFile& f) { f.tensors["positions"].dtype = "F64"; }),
              AllOf(named("positions"), HasSubstr("F64")));
  EXPECT_THAT(bend([](TensorFile& f) {
                f.tensors["positions"].bytes.replace(8 * 9, 8, "\xff\xff\xff\xff\xff\xff\xff\xff");
              }),
              AllOf(named("positions"), HasSubstr("position -1 of token 9")));
  EXPECT_THAT(bend([](TensorFile& f) {
                f.tensors["layers.1.q"].shape = {512, 1, 128};
              }),
              AllOf(named("layers.1.q"), HasSubstr("[512, 1, 128]")));
  EXPECT_THAT(bend([](TensorFile& f) { f.tensors["layers.0.q"].dtype = "I32"; }),
              AllOf(named("layers.0.q"), HasSubstr("I32")));
  EXPECT_THAT(bend([](TensorFile& f) {
                f.tensors["layers.0.k"].shape = {512, 64};
              }),
              named("layers.0.k"));
  files_[0] = good;
  CalibrateCommand command = SmallCommand();
  fs::resize_file(FilePath(0), fs::file_size(FilePath(0)) - 100);
  EXPECT_THAT(ErrorOf(command), named("truncated"));
  MakeSmall(255);
  EXPECT_THAT(SmallError(), AllOf(named("layers.0.q"), HasSubstr("only 255 tokens")));
}

TEST_F(CalibrateActivationsTest, AMissingOptionIsRequested) {
  MakeSmall(512);
  CalibrateCommand command = SmallCommand();
  command.rope_theta.reset();
  EXPECT_THAT(ErrorOf(command), AllOf(HasSubstr("rope_theta"), HasSubstr("--rope-theta")));
  command.rotary_dim = 0;
  EXPECT_TRUE(RunCalibrate(command, nullptr).status.ok());
  fs::remove(Out());
  command.positions = 0;
  EXPECT_THAT(ErrorOf(command), HasSubstr("--positions"));
  command = SmallCommand();
  command.rope_scaling = "{\"rope_type\": \"dynamic\"}";
  EXPECT_THAT(ErrorOf(command), HasSubstr("dynamic"));
  command.rope_scaling = "{";
  EXPECT_THAT(ErrorOf(command), HasSubstr("not JSON"));
  command = SmallCommand();
  command.model = kModel;
  command.value_hessian = true;
  EXPECT_THAT(ErrorOf(command), HasSubstr("head_dim 128"));
}

}  // namespace
}  // namespace crumb::tools
