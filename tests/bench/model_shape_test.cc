// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/model_shape.h"

#include <gtest/gtest.h>

namespace crumb::bench {
namespace {

ModelShape Named(const std::string& name) { return ModelShapeNamed(name).value(); }

TEST(ModelShapeTest, HasTheParametersThatTheModelsAreNamedAfter) {
  // The models have 4.02 and 8.19 thousand million parameters of two bytes.
  EXPECT_NEAR(1e-9 * static_cast<double>(Named("qwen3-4b").weight_bytes()), 8.04, 0.01);
  EXPECT_NEAR(1e-9 * static_cast<double>(Named("qwen3-8b").weight_bytes()), 16.38, 0.01);
  // The rank has an eighth of 355 thousand million parameters: experts in FP8, the rest in BF16.
  EXPECT_NEAR(1e-9 * static_cast<double>(Named("glm-4.7").weight_bytes()), 46.0, 0.5);
  EXPECT_FALSE(ModelShapeNamed("qwen3-5b").has_value());
  EXPECT_EQ(ModelShapeNames().size(), 3u);
}

TEST(ModelShapeTest, HoldsABf16TokenIn147456Bytes) {
  const ModelShape model = Named("qwen3-8b");
  const SequenceShape sequence = SequenceOf(102400);
  EXPECT_EQ(HeldBytes(model, sequence, KvFormat::kBf16), int64_t{147456} * sequence.tokens());
  EXPECT_EQ(ReadBytes(model, sequence, KvFormat::kBf16),
            HeldBytes(model, sequence, KvFormat::kBf16));
}

TEST(ModelShapeTest, SequencesAreAtMostTheContext) {
  for (int context = 415; context < 2000; ++context) {
    const SequenceShape sequence = SequenceOf(context);
    EXPECT_LE(sequence.tokens(), context);
    EXPECT_GT(sequence.tokens() + 64, context);
  }
}

TEST(ModelShapeTest, Int2ReadsTilesAndWindows) {
  const ModelShape model = Named("qwen3-8b");
  const SequenceShape sequence = SequenceOf(102400);
  // 288 heads take 4,608 bytes per page, and 512 per token of sink and recent window.
  EXPECT_EQ(ReadBytes(model, sequence, KvFormat::kInt2),
            int64_t{288} * (int64_t{4608} * sequence.pages + 512 * (64 + 287)));
  EXPECT_EQ(
      HeldBytes(model, sequence, KvFormat::kInt2) - ReadBytes(model, sequence, KvFormat::kInt2),
      int64_t{288} * 512 * (328 - 287));
}

TEST(ModelShapeTest, LargestBatchIsTheLastThatFits) {
  for (const std::string& name : ModelShapeNames()) {
    const ModelShape model = Named(name);
    const SequenceShape sequence = SequenceOf(102400);
    for (const KvFormat kv : {KvFormat::kBf16, KvFormat::kInt2}) {
      const int64_t memory = 80'000'000'000;
      const int batch = LargestBatch(model, sequence, kv, memory);
      const auto used = [&](int sequences) {
        return model.weight_bytes() + kReservedBytes + sequences * HeldBytes(model, sequence, kv);
      };
      EXPECT_LE(used(batch), memory) << name;
      EXPECT_GT(used(batch + 1), memory) << name;
    }
  }
  const ModelShape model = Named("qwen3-4b");
  EXPECT_EQ(LargestBatch(model, SequenceOf(102400), KvFormat::kBf16, 80'000'000'000), 4);
  EXPECT_EQ(LargestBatch(model, SequenceOf(102400), KvFormat::kInt2, 80'000'000'000), 32);
  EXPECT_EQ(LargestBatch(model, SequenceOf(102400), KvFormat::kInt2, 5'000'000'000), 0);
}

TEST(ModelShapeTest, ReadsTheExpertsThatABatchNeeds) {
  const ModelShape model = Named("glm-4.7");
  EXPECT_EQ(model.ExpertsRead(1), 9);  // 8 of 160, and the shared one
  int before = 0;
  for (int batch = 1; batch <= kDecodeBatchMax; ++batch) {
    EXPECT_GE(model.ExpertsRead(batch), before);
    before = model.ExpertsRead(batch);
  }
  EXPECT_EQ(before, 161);
  EXPECT_EQ(Named("qwen3-4b").ExpertsRead(32), 0);
}

TEST(ModelShapeTest, AStepReadsWeightsOnceAndEverySequence) {
  const ModelShape model = Named("qwen3-4b");
  const SequenceShape sequence = SequenceOf(102400);
  EXPECT_EQ(StepBytes(model, sequence, KvFormat::kInt2, 7),
            model.weight_bytes() + 7 * ReadBytes(model, sequence, KvFormat::kInt2));
  // A separate embedding table is held, and one row of it is read.
  const ModelShape untied = Named("qwen3-8b");
  EXPECT_EQ(StepBytes(untied, sequence, KvFormat::kBf16, 0),
            untied.weight_bytes() - int64_t{2} * 151936 * 4096);
}

}  // namespace
}  // namespace crumb::bench
