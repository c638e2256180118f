// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of the quality watch with the small model: no alarm with the model's own rotation, an alarm
// with that of another model.
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
#include "tools/activations.h"

namespace crumb::client {
namespace {

std::string Source(const char* name) { return std::string(CRUMB_SOURCE_DIR) + "/" + name; }

class QualityWatchModelTest : public testing::Test {
 protected:
  static constexpr const char* kModel = CRUMB_SOURCE_DIR "/models/data/tiny-lm";

  static void SetUpTestSuite() { file_ = new RotationFile(Calibrate()); }
  static void TearDownTestSuite() { delete file_; }

  static RotationFile Calibrate() {
    tools::ModelActivations::Options options;
    options.model = kModel;
    options.texts = {Source("models/engine.cc"), Source("storage/store/open_tiered_store.cc")};
    options.tokens = 4096;
    const auto source = tools::ModelActivations::Open(options).value();
    auto calibration = calibration::DefaultCalibration(kernels::Method::kCrumb);
    calibration.positions = 4096;
    auto file = calibration::Calibrate(*source, calibration, [](double) {});
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  // Returns the file of a model with another order of layers: correct shapes, wrong values.
  static RotationFile OfAnotherModel(RotationFile file) {
    for (std::vector<float>* values :
         {&file.rotation_k, &file.rotation_v, &file.mean_k, &file.mean_v, &file.feedback_k,
          &file.feedback_v, &file.dual_k, &file.dual_v, &file.shift, &file.covariance_k,
          &file.eigenvalues_k, &file.eigenvalues_v}) {
      if (values->empty()) continue;
      std::rotate(values->begin(), values->begin() + values->size() / file.layers, values->end());
    }
    return file;
  }

  // Opens a worker without crumbd that measures every window, with the default bound.
  std::unique_ptr<Worker> OpenWorker(const RotationFile& file) {
    return Worker::Open(OptionsFor(file), nullptr).value();
  }
  WorkerOptions OptionsFor(const RotationFile& file) {
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
    options.prefill_block = 320;
    options.watch_every = 1;
    return options;
  }

  // Reads the first 2,500 tokens of a text that was not used for calibration.
  std::unique_ptr<Sequence> Read(Worker& worker, const char* path) {
    std::ifstream in(Source(path));
    std::stringstream text;
    text << in.rdbuf();
    std::vector<int32_t> tokens = tokenizer_->Encode(text.str());
    EXPECT_GE(tokens.size(), 2500u);
    tokens.resize(2500);
    auto sequence = worker.Begin(tokens).value();
    tiny_lm::SequenceCache cache(*sequence);
    for (size_t at = 0; at < tokens.size(); at += 250) {
      const auto logits =
          engine_->Forward(cache, std::span(tokens).subspan(at, 250), models::LogitRows::kLast);
      EXPECT_TRUE(logits.ok()) << logits.status();
    }
    return sequence;
  }

  static RotationFile* file_;  // rotation file of the model
  const std::unique_ptr<models::Engine> engine_ = models::Engine::Load(kModel, {}).value();
  const std::unique_ptr<models::Tokenizer> tokenizer_ = models::Tokenizer::Load(kModel).value();
};

RotationFile* QualityWatchModelTest::file_ = nullptr;

constexpr const char* kCode = "client/cpu/cpu_sequence.cc";
constexpr const char* kProse = "docs/quality/results.md";
// 34 of the 38 pages behind the sink end in the last full block or before. The first block's
// windows are evicted without queries if it ends in the middle of a pass.
constexpr int kWindowsOfOneText = 29;

TEST_F(QualityWatchModelTest, TheRightRotationServesForeignTexts) {
  EXPECT_FALSE(file_->attention_error.empty());
  const auto worker = OpenWorker(*file_);
  for (const char* text : {kCode, kProse, "client/rpc/remote_client.cc"}) {
    EXPECT_LT(Read(*worker, text)->stats().bits_per_element(), 6.0);
  }
  EXPECT_GE(worker->counters().windows_measured, 3 * kWindowsOfOneText);
  EXPECT_EQ(worker->counters().quality_alarms, 0);
}

TEST_F(QualityWatchModelTest, ARotationOfAnotherModelIsGivenUp) {
  const auto worker = OpenWorker(OfAnotherModel(*file_));
  EXPECT_LT(Read(*worker, kCode)->stats().bits_per_element(), 6.0);
  Read(*worker, kProse);
  EXPECT_GE(worker->counters().quality_alarms, 1);
  const uint64_t measured = worker->counters().windows_measured;
  EXPECT_EQ(Read(*worker, kCode)->stats().bits_per_element(), 16.0);
  EXPECT_EQ(worker->counters().windows_measured, measured);  // BF16 pages have no errors to watch
}

// Files of older versions have no expected error.
TEST_F(QualityWatchModelTest, WithoutAnExpectedErrorTheBoundIsAbsolute) {
  RotationFile file = *file_;
  file.attention_error.clear();
  EXPECT_FLOAT_EQ(OptionsFor(file).watch_error_bound(), 0.6);
  const auto worker = OpenWorker(file);
  Read(*worker, kCode);
  Read(*worker, kProse);
  EXPECT_GE(worker->counters().windows_measured, 2 * kWindowsOfOneText);
  EXPECT_EQ(worker->counters().quality_alarms, 0);
}

}  // namespace
}  // namespace crumb::client
