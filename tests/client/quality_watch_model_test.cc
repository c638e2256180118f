// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The quality watch over the small model: silent with the model's own rotation, loud with another
// model's.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "calibration/calibrator.h"
#include "client/examples/tiny_lm/sequence_cache.h"
#include "common/rotation_file.h"
#include "crumb/worker.h"
#include "gtest/gtest.h"
#include "models/engine.h"
#include "models/tokenizer.h"
#include "tools/model_activations.h"

namespace crumb::client {
namespace {

std::string Source(const char* name) { return std::string(CRUMB_SOURCE_DIR) + "/" + name; }

class QualityWatchModelTest : public testing::Test {
 protected:
  static constexpr const char* kModel = CRUMB_SOURCE_DIR "/models/data/tiny-lm";

  static RotationFile Calibrate() {
    tools::ModelActivations::Options options;
    options.model = kModel;
    options.texts = {Source("models/engine.cc"), Source("storage/tiered_store.cc")};
    options.tokens = 4096;
    const auto source = tools::ModelActivations::Open(options).value();
    auto calibration = calibration::DefaultCalibration(kernels::Method::kCrumb);
    calibration.positions = 4096;
    auto file = calibration::Calibrate(*source, calibration, [](double) {});
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  // The file of a model whose layers come in another order: right in shape, wrong in every value.
  static RotationFile OfAnotherModel(RotationFile file) {
    for (std::vector<float>* values :
         {&file.rotation_k, &file.rotation_v, &file.mean_k, &file.mean_v, &file.feedback_k,
          &file.feedback_v, &file.shift, &file.covariance_k, &file.eigenvalues_k,
          &file.eigenvalues_v}) {
      if (values->empty()) continue;
      std::rotate(values->begin(), values->begin() + values->size() / file.layers, values->end());
    }
    return file;
  }

  // A worker without crumbd that measures every window and gives up above 0.45.
  std::unique_ptr<Worker> OpenWorker(const RotationFile& file) {
    const std::string path =
        testing::TempDir() + "crumb_watch_" + std::to_string(::getpid()) + ".safetensors";
    EXPECT_TRUE(WriteRotationFile(file, path).ok());
    WorkerOptions options;
    EXPECT_TRUE(options.UseRotationFile(path).ok());
    std::filesystem::remove(path);
    options.model = "tiny-lm";
    options.weights = "1";
    options.layers = engine_->config().layers;
    options.kv_heads = engine_->config().kv_heads;
    options.q_heads = engine_->config().q_heads;
    options.head_dim = engine_->config().head_dim;
    options.prefill_block = 512;
    options.watch_every = 1;
    options.watch_windows = 16;
    options.watch_error_max = 0.45f;
    return Worker::Open(options, nullptr).value();
  }

  // Reads 2,000 tokens of source code that was not calibrated on.
  std::unique_ptr<Sequence> Read(Worker& worker) {
    std::ifstream in(Source("client/three_segment_sequence.cc"));
    std::stringstream text;
    text << in.rdbuf();
    std::vector<int32_t> tokens = tokenizer_->Encode(text.str());
    EXPECT_GE(tokens.size(), 2000u);
    tokens.resize(2000);
    auto sequence = worker.Begin(tokens).value();
    tiny_lm::SequenceCache cache(*sequence);
    for (size_t at = 0; at < tokens.size(); at += 250) {
      const auto logits =
          engine_->Forward(cache, std::span(tokens).subspan(at, 250), models::LogitRows::kLast);
      EXPECT_TRUE(logits.ok()) << logits.status();
    }
    return sequence;
  }

  const std::unique_ptr<models::Engine> engine_ = models::Engine::Load(kModel, {}).value();
  const std::unique_ptr<models::Tokenizer> tokenizer_ = models::Tokenizer::Load(kModel).value();
};

TEST_F(QualityWatchModelTest, ARotationOfAnotherModelIsGivenUp) {
  const RotationFile file = Calibrate();
  const auto right = OpenWorker(file);
  EXPECT_LT(Read(*right)->stats().bits_per_element(), 5.0);
  // Of the 30 pages behind the sink, 25 end in the last full block or before; the first block had
  // queries to measure with, its second pass stored it.
  EXPECT_GE(right->counters().windows_measured, 16);
  EXPECT_EQ(right->counters().quality_alarms, 0);
  EXPECT_LT(Read(*right)->stats().bits_per_element(), 5.0);

  const auto wrong = OpenWorker(OfAnotherModel(file));
  EXPECT_LT(Read(*wrong)->stats().bits_per_element(), 5.0);
  EXPECT_GE(wrong->counters().quality_alarms, 1);
  const uint64_t measured = wrong->counters().windows_measured;
  EXPECT_EQ(Read(*wrong)->stats().bits_per_element(), 16.0);
  EXPECT_EQ(wrong->counters().windows_measured, measured);  // exact pages need no watching
}

}  // namespace
}  // namespace crumb::client
