// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Absorbs a model with biases and runs it: the logits are unchanged, and the values are rotated.
#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <random>
#include <vector>

#include "calibration/eigenbasis.h"
#include "common/rotation_file.h"
#include "models/engine.h"
#include "models/kv_cache.h"
#include "tests/common/temporary_folder.h"
#include "tests/models/model_folder.h"
#include "tests/models/reference_model.h"
#include "tools/commands.h"

namespace crumb::tools {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The tolerance for values that are rounded to bf16 in another basis: 2^-9 of each.
constexpr double kTolerance = 1e-2;

std::vector<int32_t> Tokens() {
  std::vector<int32_t> tokens;
  for (int i = 0; i < 60; ++i) tokens.push_back((i * 29 + 7) % 96);
  return tokens;
}

RotationFile RandomRotations(int layers, int kv_heads, int head_dim) {
  RotationFile file;
  file.method = "crumb";
  file.layers = layers;
  file.kv_heads = kv_heads;
  file.head_dim = head_dim;
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (int i = 0; i < layers * kv_heads; ++i) {
    const Eigen::MatrixXd rows =
        Eigen::MatrixXd::NullaryExpr(2 * head_dim, head_dim, [&] { return normal(random); });
    const RowMajor rotation =
        calibration::MakeEigenbasis(rows.transpose() * rows).rotation.cast<float>();
    file.rotation_v.insert(file.rotation_v.end(), rotation.data(),
                           rotation.data() + rotation.size());
  }
  file.rotation_k = file.rotation_v;
  file.mean_v.assign(size_t{1} * layers * kv_heads * head_dim, 0.0f);
  return file;
}

TEST(AbsorbEngineTest, AModelWithBiasesKeepsItsLogits) {
  const models::SmallModel model = models::RandomSmallModel(true, 21);
  const models::ModelFolder folder;
  models::WriteModel(model, folder);
  const TemporaryFolder out;
  const RotationFile file =
      RandomRotations(model.config["num_hidden_layers"], model.config["num_key_value_heads"],
                      model.config["head_dim"]);
  ASSERT_TRUE(WriteRotationFile(file, out.File("rotation")).ok());
  const CommandResult absorbed =
      RunAbsorb({folder.path(), out.File("rotation"), out.File("model")}, nullptr);
  ASSERT_TRUE(absorbed.status.ok()) << absorbed.status;

  const auto engine = models::Engine::Load(out.File("model"), {.threads = 1});
  ASSERT_TRUE(engine.ok()) << engine.status();
  models::DenseKvCache cache((*engine)->config(), (*engine)->pool());
  const auto logits = (*engine)->Forward(cache, Tokens(), models::LogitRows::kAll);
  ASSERT_TRUE(logits.ok()) << logits.status();
  EXPECT_LT(models::RelativeDifference(logits->values, models::ReferenceLogits(model, Tokens())),
            kTolerance);

  // The logits agree although the values changed, because biases are rotated as well.
  models::SmallModel mixed = model;
  const auto tensors =
      models::ParseSafetensors(models::ReadText(out.File("model") + "/model.safetensors"));
  for (const auto& [name, tensor] : tensors) {
    if (!name.ends_with("v_proj.bias")) mixed.tensors[name] = tensor;
  }
  EXPECT_GT(models::RelativeDifference(logits->values, models::ReferenceLogits(mixed, Tokens())),
            10 * kTolerance);
}

}  // namespace
}  // namespace crumb::tools
