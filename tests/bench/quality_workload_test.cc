// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_workload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "calibration/calibrator.h"
#include "common/rotation_file.h"

namespace crumb::bench {
namespace {

QualityOptions SmallOptions() {
  QualityOptions options;
  options.model = "models/data/tiny-lm";
  options.texts = {"LICENSE"};
  options.calibration_texts = {"docs/architecture.md"};
  options.contexts = {640};
  options.sequences = 2;
  options.passkeys = 0;
  options.calibration_context = 320;
  options.clip_sequences = 0;
  options.threads = 2;
  options.quiet = true;
  return options;
}

std::string ErrorOf(const QualityOptions& options) {
  return std::string(RunQualityWorkload(options).status().message());
}

TEST(QualityWorkloadTest, ComparesMethodsOnTheSameSequences) {
  QualityOptions options = SmallOptions();
  options.methods = {"bf16", "naive", "kivi", "turboquant3", "int4-hadamard", "oscar", "crumb"};
  options.clip_sequences = 1;
  options.passkeys = 4;
  const auto result = RunQualityWorkload(options);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->rows.size(), 8u);
  const QualityRow &bf16 = result->rows[0], &naive = result->rows[1], &kivi = result->rows[2],
                   &turbo = result->rows[3], &int4 = result->rows[4], &oscar = result->rows[5],
                   &best = result->rows[6], &crumb = result->rows[7];
  EXPECT_EQ(bf16.bits, 16.0);
  EXPECT_EQ(kivi.bits, 2.5);
  EXPECT_EQ(turbo.bits, 3.1875);
  EXPECT_EQ(int4.bits, 4.25);
  EXPECT_EQ(crumb.bits, 2.25);
  EXPECT_EQ(crumb.bits_with_windows, 2.25 * 0.5 + 16.0 * 0.5);
  // Another schedule of attention computes the same numbers.
  EXPECT_LT(bf16.kl.mean, 1e-3);
  EXPECT_NEAR(bf16.perplexity.mean, result->exact_perplexity[0],
              0.02 * result->exact_perplexity[0]);
  EXPECT_GT(naive.kl.mean, oscar.kl.mean);
  EXPECT_GT(oscar.kl.mean, crumb.kl.mean);
  EXPECT_GT(crumb.kl.mean, int4.kl.mean);
  EXPECT_GT(bf16.top1.mean, naive.top1.mean);
  EXPECT_EQ(oscar.kl_over_oscar.value, 1.0);
  EXPECT_EQ(best.method, "oscar-best-clip");
  EXPECT_EQ(best.kl_over_best_oscar.value, 1.0);
  EXPECT_LE(crumb.kl_over_oscar.low, crumb.kl_over_oscar.value);
  EXPECT_GE(crumb.kl_over_oscar.high, crumb.kl_over_oscar.value);
  // In one prefill block no token reads stored pages.
  EXPECT_LT(naive.kl_prefill.mean, 1e-3);
  EXPECT_EQ(result->passkeys, 4);
  EXPECT_TRUE(crumb.has_passkeys);
  EXPECT_EQ(bf16.passkey.below_bf16.value, 0.0);
  EXPECT_GT(bf16.passkey.recall.mean, 0.7);
  EXPECT_LT(bf16.passkey.answer_nll.mean, 0.5);
}

// After the end of a block, prefill reads stored pages, but fewer than decode.
TEST(QualityWorkloadTest, PrefillReadsEarlierBlocksAsStored) {
  QualityOptions options = SmallOptions();
  options.methods = {"bf16", "naive", "kivi"};
  options.prefill_block = 384;
  const auto result = RunQualityWorkload(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_LT(result->rows[0].kl_prefill.mean, 1e-3);
  for (const int row : {1, 2}) {
    EXPECT_GT(result->rows[row].kl_prefill.mean, 1e-3);
    EXPECT_NE(result->rows[row].kl_prefill.mean, result->rows[row].kl.mean);
  }
}

TEST(QualityWorkloadTest, RotationFilesAreMethodsToo) {
  QualityOptions options = SmallOptions();
  options.methods = {"hadamard", "naive"};
  for (const auto& file : {calibration::HadamardRotations(128), calibration::NaiveRotations(128)}) {
    ASSERT_TRUE(file.ok());
    options.rotations.push_back(testing::TempDir() + "crumb_quality_" + std::to_string(::getpid()) +
                                "." + file->method);
    ASSERT_TRUE(WriteRotationFile(*file, options.rotations.back()).ok());
  }
  options.threads = 1;
  const auto result = RunQualityWorkload(options);
  for (const std::string& path : options.rotations) std::filesystem::remove(path);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->rows.size(), 4u);
  EXPECT_EQ(result->rows[0].kl.mean, result->rows[2].kl.mean);
  EXPECT_EQ(result->rows[1].kl.mean, result->rows[3].kl.mean);
  EXPECT_NE(result->rows[0].kl.mean, result->rows[1].kl.mean);
  EXPECT_EQ(result->rows[1].kl_over_oscar.value, 0.0);
}

TEST(QualityWorkloadTest, WrongInputIsNamed) {
  QualityOptions options = SmallOptions();
  options.contexts = {4096};
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("sequences of 4096 tokens; at least 2"));
  options = SmallOptions();
  options.calibration_texts.clear();
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("need calibration text"));
  options = SmallOptions();
  options.contexts = {1 << 16};
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("4096 positions"));
  options = SmallOptions();
  options.calibration_texts.push_back("LICENSE");
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("LICENSE share everything"));
  options = SmallOptions();
  options.contexts = {512};
  options.passkeys = 4;
  options.methods = {"zip"};  // not reached: passkeys come before anything is prepared
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("use --passkeys 0"));
  options = SmallOptions();
  options.methods = {"zip"};
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("no method is called zip"));
  options = SmallOptions();
  options.model = "docs";
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("docs"));
  options = SmallOptions();
  options.texts = {"no/such/text"};
  EXPECT_THAT(ErrorOf(options), testing::HasSubstr("no/such/text"));
}

#ifndef CRUMB_HAVE_CUDA
TEST(QualityWorkloadTest, ADeviceThatIsNotThereIsAnError) {
  QualityOptions options = SmallOptions();
  options.device = "cuda";
  const auto result = RunQualityWorkload(options);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
}
#endif

}  // namespace
}  // namespace crumb::bench
