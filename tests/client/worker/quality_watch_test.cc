// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/quality_watch.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

class QualityWatchTest : public testing::Test {
 protected:
  QualityWatchTest() {
    options_.watch_every = 3;
    options_.watch_windows = 4;
    options_.watch_error_max = 0.5f;
  }

  void Record(float error) {
    const std::vector<QualitySample> layers = {
        {.layer = 0, .attention_error = error - 0.1f, .key_error = 9.0f, .value_error = 9.0f},
        {.layer = 1, .attention_error = error + 0.1f, .key_error = 9.0f, .value_error = 9.0f}};
    watch_.Record(layers);
  }

  WorkerOptions options_ = SmallWorkerOptions();
  std::vector<double> alarms_;
  QualityWatch watch_{options_, [this](double error) { alarms_.push_back(error); }};
};

TEST_F(QualityWatchTest, EveryThirdWindowAndTheHeadsInTurn) {
  std::vector<int> turns;
  for (int window = 0; window < 12; ++window) {
    turns.push_back(watch_.NextSample().value_or(-1));
  }
  const int last = options_.kv_heads > 1 ? 1 : 0;
  EXPECT_EQ(turns, (std::vector<int>{0, -1, -1, last, -1, -1, 2 % options_.kv_heads, -1, -1,
                                     3 % options_.kv_heads, -1, -1}));
  options_.watch_every = 0;
  EXPECT_FALSE(watch_.enabled());
  EXPECT_FALSE(watch_.NextSample().has_value());
}

TEST_F(QualityWatchTest, AlarmsWhenTheMeanOfTheLatestWindowsIsAboveTheBound) {
  for (const float error : {0.9f, 0.9f, 0.9f}) Record(error);
  EXPECT_TRUE(alarms_.empty());  // three windows are not enough
  Record(0.1f);                  // the mean of four is 0.7
  ASSERT_EQ(alarms_.size(), 1u);
  EXPECT_NEAR(alarms_[0], 0.7, 1e-6);
  // The next alarm needs four windows again.
  for (const float error : {0.9f, 0.9f, 0.9f}) Record(error);
  EXPECT_EQ(alarms_.size(), 1u);
  Record(0.9f);
  EXPECT_EQ(alarms_.size(), 2u);
}

TEST_F(QualityWatchTest, AnOutlierAloneIsNoAlarm) {
  for (int window = 0; window < 100; ++window) Record(window % 10 == 0 ? 0.9f : 0.3f);
  EXPECT_TRUE(alarms_.empty());
}

// Errors of [2 layers, 2 KV heads], such as 0.2, 0.3, 0.4, 0.5.
WorkerOptions OptionsThatExpect(std::vector<float> errors) {
  WorkerOptions options = SmallWorkerOptions();
  options.layers = options.kv_heads = 2;
  options.q_heads = 4;
  RotationSet::Arrays arrays;
  arrays.layers = arrays.kv_heads = 2;
  arrays.head_dim = options.head_dim;
  arrays.attention_error = std::move(errors);
  options.rotations = RotationSet::Of("expecting", std::move(arrays)).value();
  return options;
}

TEST_F(QualityWatchTest, TheBoundIsRelativeWhereAnErrorIsExpected) {
  WorkerOptions options = OptionsThatExpect({0.2f, 0.3f, 0.4f, 0.5f});
  ASSERT_TRUE(options.Validate().ok()) << options.Validate();
  options.watch_error_factor = 1.5f;
  EXPECT_NEAR(options.watch_error_bound(), 1.5 * 0.35, 1e-6);
  // A rank's bound is that of its own layers and heads.
  options.part.layers = {1, 2};
  EXPECT_NEAR(options.watch_error_bound(), 1.5 * 0.45, 1e-6);
  options.part.kv_heads = {0, 1};
  EXPECT_NEAR(options.watch_error_bound(), 1.5 * 0.4, 1e-6);
  options.watch_error_factor = 0.0f;
  EXPECT_FLOAT_EQ(options.watch_error_bound(), options.watch_error_max);
  options.watch_error_factor = 1.5f;
  options.watch_error_max = 0.0f;
  EXPECT_EQ(options.watch_error_bound(), 0.0);
}

TEST_F(QualityWatchTest, TheBoundIsAbsoluteWhereNoneIsExpected) {
  EXPECT_FLOAT_EQ(WorkerOptions(SmallWorkerOptions()).watch_error_bound(),
                  WorkerOptions().watch_error_max);
  EXPECT_EQ(OptionsThatExpect({0.2f, 0.3f, 0.4f, 0.5f}).rotations.digest(),
            OptionsThatExpect({}).rotations.digest());
  EXPECT_FLOAT_EQ(OptionsThatExpect({}).watch_error_bound(), WorkerOptions().watch_error_max);
}

TEST_F(QualityWatchTest, AlarmsAboveTheRelativeBound) {
  options_ = OptionsThatExpect({0.2f, 0.2f, 0.2f, 0.2f});
  options_.watch_windows = 4;
  options_.watch_error_factor = 2.0f;
  for (int window = 0; window < 20; ++window) Record(0.39f);
  EXPECT_TRUE(alarms_.empty());
  for (int window = 0; window < 4; ++window) Record(0.41f);
  EXPECT_EQ(alarms_.size(), 1u);
}

TEST_F(QualityWatchTest, NoBoundNoAlarm) {
  options_.watch_error_max = 0.0f;
  for (int window = 0; window < 20; ++window) Record(2.0f);
  EXPECT_TRUE(alarms_.empty());
}

}  // namespace
}  // namespace crumb::client
