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
  options.context = 640;
  options.sequences = 2;
  options.calibration_context = 320;
  options.threads = 1;
  return options;
}

TEST(QualityWorkloadTest, ComparesMethodsOnTheSameSequences) {
  QualityOptions options = SmallOptions();
  options.methods = {"bf16", "naive", "oscar", "crumb"};
  const auto result = RunQualityWorkload(options);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->rows.size(), 4u);
  const QualityRow &bf16 = result->rows[0], &naive = result->rows[1], &oscar = result->rows[2],
                   &crumb = result->rows[3];
  EXPECT_EQ(bf16.bits, 16.0);
  EXPECT_EQ(crumb.bits, 2.25);
  // The same numbers by another schedule of attention.
  EXPECT_LT(bf16.kl, 1e-3);
  EXPECT_NEAR(bf16.perplexity, result->exact_perplexity, 0.02 * result->exact_perplexity);
  EXPECT_GT(naive.kl, oscar.kl);
  EXPECT_GT(oscar.kl, crumb.kl);
  EXPECT_GT(bf16.top1, naive.top1);
  EXPECT_EQ(oscar.kl_over_oscar, 1.0);
  EXPECT_LE(crumb.kl_over_oscar_low, crumb.kl_over_oscar);
  EXPECT_GE(crumb.kl_over_oscar_high, crumb.kl_over_oscar);
  EXPECT_EQ(QualityJson(*result)["rows"][3]["method"], "crumb");
}

TEST(QualityWorkloadTest, RotationFilesAreMethodsToo) {
  auto file = calibration::HadamardRotations(128);
  ASSERT_TRUE(file.ok());
  const std::string path =
      testing::TempDir() + "crumb_quality_" + std::to_string(::getpid()) + ".rotation";
  ASSERT_TRUE(WriteRotationFile(*file, path).ok());
  QualityOptions options = SmallOptions();
  options.methods = {"hadamard"};
  options.rotations = {path};
  const auto result = RunQualityWorkload(options);
  std::filesystem::remove(path);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->rows.size(), 2u);
  EXPECT_EQ(result->rows[0].kl, result->rows[1].kl);
  EXPECT_EQ(result->rows[1].kl_over_oscar, 0.0);
}

TEST(QualityWorkloadTest, WrongInputIsNamed) {
  QualityOptions options = SmallOptions();
  options.sequences = 1;
  EXPECT_THAT(std::string(RunQualityWorkload(options).status().message()),
              testing::HasSubstr("1 sequences"));
  options = SmallOptions();
  options.calibration_texts.clear();
  EXPECT_THAT(std::string(RunQualityWorkload(options).status().message()),
              testing::HasSubstr("need calibration text"));
  options = SmallOptions();
  options.context = 1 << 16;
  EXPECT_THAT(std::string(RunQualityWorkload(options).status().message()),
              testing::HasSubstr("positions"));
}

}  // namespace
}  // namespace crumb::bench
