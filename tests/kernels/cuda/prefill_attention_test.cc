// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <tuple>

#include "kernels/bf16.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/prefill_case.h"

namespace crumb::kernels::cuda {
namespace {

// Sequences that end and begin around every boundary, padding among them.
std::vector<ChunkLengths> Ragged() {
  return {{64, 7, 0, 130}, {0, 0, 0, 0},  {64, 1, 70, 33}, {10, 0, 0, 65},
          {64, 2, 3, 1},   {64, 0, 5, 9}, {0, 0, 0, 40},   {64, 11, 31, 5}};
}

struct Shape {
  int head_dim, group_size, kv_heads, group;
};

// Whether the call is served by products of four warps.
bool UsesTeams(const PrefillOptions& options) {
  int device = 0, major = 0;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), cudaSuccess);
  return major == 9 && options.products == PrefillProducts::kAuto &&
         options.row_type == RowType::kBf16 && options.out_type != OutType::kFp16 &&
         options.tile.head_dim == 128 && options.tile.group_size >= 64 &&
         options.soft_cap <= 0.0f && options.window <= 0;
}

// Products of one warp take q' rounded to fp16, whose error grows with the logits; those of four
// warps take what was rounded away too. Rounding a row to bf16 alone takes 1.6e-3 on average and,
// with few channels, up to 2.4e-3.
double ErrorBound(bool teams, OutType type, double logit_std) {
  if (teams) return type == OutType::kF32 ? 5e-4 : 2.4e-3;
  if (type == OutType::kF32) return logit_std < 4 ? 1e-3 : 4e-3;
  return logit_std < 4 ? 2.6e-3 : 5e-3;
}

class PrefillShapes : public testing::TestWithParam<std::tuple<Shape, PrefillProducts>> {};

TEST_P(PrefillShapes, AgreesWithTheOracle) {
  CRUMB_NEEDS_DEVICE();
  const auto& [shape, products] = GetParam();
  for (const double logit_std : {1.0, 2.0, 8.0}) {
    for (const OutType type : {OutType::kF32, OutType::kBf16}) {
      PrefillOptions options;
      options.products = products;
      options.tile = {64, shape.head_dim, shape.group_size};
      options.kv_heads = shape.kv_heads;
      options.group = shape.group;
      options.sequences = Ragged();
      options.logit_std = logit_std;
      options.out_type = type;
      options.seed = 3 + shape.group;
      PrefillCase run(options);
      run.Run();
      const double error = run.WorstError(150);
      const double bound = ErrorBound(UsesTeams(options), type, logit_std);
      std::printf("d %d G %d g %d %s std %.0f %s: error %.2e\n", shape.head_dim, shape.group_size,
                  shape.group, products == PrefillProducts::kAuto ? "auto" : "warp", logit_std,
                  type == OutType::kF32 ? "f32" : "bf16", error);
      EXPECT_LE(error, bound);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PrefillShapes,
    testing::Combine(
        testing::Values(Shape{128, 128, 2, 4}, Shape{128, 128, 3, 1}, Shape{128, 128, 2, 3},
                        Shape{128, 128, 1, 5}, Shape{128, 128, 1, 6}, Shape{128, 128, 2, 7},
                        Shape{128, 128, 1, 12}, Shape{128, 128, 1, 16}, Shape{128, 64, 2, 4},
                        Shape{128, 32, 2, 4}, Shape{64, 64, 2, 4}, Shape{64, 32, 1, 8},
                        Shape{256, 128, 2, 2}, Shape{256, 64, 1, 4}, Shape{256, 32, 1, 3}),
        testing::Values(PrefillProducts::kAuto, PrefillProducts::kWarp)));

class PrefillFp16 : public testing::TestWithParam<Shape> {};

TEST_P(PrefillFp16, AgreesWithTheOracle) {
  CRUMB_NEEDS_DEVICE();
  const Shape& shape = GetParam();
  for (const double logit_std : {1.0, 2.0, 8.0}) {
    // With small values p is far above 1 while pages are attended.
    for (const double value_std : {1.0, 1e-2, 1e-4}) {
      for (const OutType type : {OutType::kF32, OutType::kFp16}) {
        PrefillOptions options;
        options.row_type = RowType::kFp16;
        options.out_type = type;
        options.tile = {64, shape.head_dim, shape.group_size};
        options.kv_heads = shape.kv_heads;
        options.group = shape.group;
        options.sequences = Ragged();
        options.logit_std = logit_std;
        options.value_std = value_std;
        options.transforms = shape.group != 7;
        options.seed = 5 + shape.group;
        PrefillCase run(options);
        run.Run();
        const double error = run.WorstError(150);
        std::printf("fp16: d %d G %d g %d %s std %.0f, %g: error %.2e\n", shape.head_dim,
                    shape.group_size, shape.group, type == OutType::kF32 ? "f32" : "fp16",
                    logit_std, value_std, error);
        // q' in fp16 as in ErrorBound, up to 1.1e-3 here; means of values of 1e-4 are subnormal.
        const double query = logit_std < 4 ? 1.2e-3 : 4e-3;
        const double rounding = type == OutType::kF32 ? 0.0 : value_std < 1e-3 ? 3e-3 : 4e-4;
        EXPECT_LE(error, query + rounding);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PrefillFp16,
                         testing::Values(Shape{128, 128, 2, 4}, Shape{128, 128, 1, 7},
                                         Shape{128, 64, 1, 5}, Shape{128, 32, 2, 3},
                                         Shape{64, 64, 2, 4}, Shape{64, 32, 1, 12},
                                         Shape{256, 128, 1, 2}, Shape{256, 64, 1, 3},
                                         Shape{256, 32, 1, 1}));

TEST(PrefillAttention, Fp16RowsWithCapsWindowsAndLearnedSinks) {
  CRUMB_NEEDS_DEVICE();
  for (int mask = 0; mask < 16; ++mask) {
    PrefillOptions options;
    options.row_type = RowType::kFp16;
    options.sequences = {{64, 5, 6, 30}, {64, 9, 0, 70}, {0, 0, 0, 12}};
    options.offset = options.shift = (mask & 1) != 0;
    options.sink_logit = (mask & 2) != 0;
    options.soft_cap = (mask & 4) != 0 ? 3.0f : 0.0f;
    options.window = (mask & 8) != 0 ? 300 : 0;
    options.seed = mask;
    PrefillCase run(options);
    run.Run();
    EXPECT_LE(run.WorstError(40), 1e-3) << "mask " << mask;
  }
}

TEST(PrefillAttention, EveryTermOfTheLogit) {
  CRUMB_NEEDS_DEVICE();
  for (int mask = 0; mask < 64; ++mask) {
    PrefillOptions options;
    options.group = mask % 2 == 0 ? 4 : 6;
    options.sequences = {{64, 5, 6, 30}, {64, 9, 0, 70}, {0, 0, 0, 12}};
    options.offset = (mask & 1) != 0;
    options.shift = (mask & 2) != 0;
    options.sink_logit = (mask & 4) != 0;
    options.soft_cap = (mask & 8) != 0 ? 3.0f : 0.0f;
    options.window = (mask & 16) != 0 ? 300 : 0;
    options.transforms = (mask & 32) == 0;
    options.seed = mask;
    PrefillCase run(options);
    run.Run();
    EXPECT_LE(run.WorstError(40), options.transforms ? 5e-4 : 1.5e-3) << "mask " << mask;
  }
}

TEST(PrefillAttention, WindowsOfEveryLength) {
  CRUMB_NEEDS_DEVICE();
  for (const int window : {1, 2, 33, 63, 64, 65, 100, 128, 200, 700, 5000}) {
    PrefillOptions options;
    options.sequences = {{64, 9, 20, 77}, {64, 2, 0, 150}};
    options.window = window;
    PrefillCase run(options);
    run.Run();
    EXPECT_LE(run.WorstError(60), 5e-4) << "window " << window;
  }
}

TEST(PrefillAttention, LengthsAroundEveryBoundary) {
  CRUMB_NEEDS_DEVICE();
  PrefillOptions options;
  for (const int fresh : {1, 31, 32, 33, 63, 64, 65, 129}) {
    for (const int pages : {0, 1, 5, 6, 7, 13}) options.sequences.push_back({64, pages, 0, fresh});
  }
  PrefillCase run(options);
  run.Run();
  EXPECT_LE(run.WorstError(500), 5e-4);
  const std::vector<uint8_t> bulk = run.OutBytes();
  run.Run();
  EXPECT_EQ(run.OutBytes(), bulk) << "a second run gave other bits";
}

TEST(PrefillAttention, PaddedEntriesStayUntouched) {
  CRUMB_NEEDS_DEVICE();
  PrefillOptions options;
  options.sequences = {{64, 3, 0, 0}, {64, 2, 0, 37}, {0, 0, 0, 0}};
  PrefillCase alone(options);
  alone.Run();
  EXPECT_LE(alone.WorstError(60), 5e-4);
  // The grid's room beyond a sequence's tokens writes nothing: rows behind the last stay poisoned.
  options.sequences = {{64, 3, 0, 0}, {0, 0, 0, 0}, {64, 0, 0, 300}};
  PrefillCase wide(options);
  wide.Run();
  EXPECT_LE(wide.WorstError(60), 5e-4);
}

TEST(PrefillAttention, SmallValuesAndPeaks) {
  CRUMB_NEEDS_DEVICE();
  for (const double value_std : {1.0, 1e-2, 1e-4}) {
    for (const double nats : {0.0, 8.0, 14.0, 16.0}) {
      PrefillOptions options;
      options.kv_heads = 1;
      options.group = 2;
      options.sequences = {{64, 400, 0, 3}};
      options.value_std = value_std;
      options.logit_std = 0.01;
      options.transforms = false;
      PrefillCase run(options);
      if (nats > 0.0) {
        // A constant K row whose logit is `nats` for the first query row.
        double sum = 0.0;
        for (int i = 0; i < 128; ++i) sum += Bf16ToFloat(run.q()[i]);
        for (const int page : {7, 311}) {
          WriteMeta(options.tile, TilePart::kKey, 21, 0,
                    {0, Half((page == 7 ? 0.5 : 1.0) * nats * std::sqrt(128.0) / sum)},
                    run.Tile(0, page, 0));
        }
        run.Upload();
      }
      run.Run();
      const double error = run.RowError(0, run.Out(), run.Lse());
      std::printf("values %.0e, peak %.0f nats: error %.1e\n", value_std, nats, error);
      EXPECT_LE(error, 1e-3);
    }
  }
}

TEST(PrefillAttention, ExtremeRowsStayWithTheirQuery) {
  CRUMB_NEEDS_DEVICE();
  PrefillOptions options;
  options.sequences = {{64, 6, 10, 50}};
  PrefillCase run(options);
  run.Run();
  const std::vector<float> before = run.Out();
  const int dim = 128, poisoned = 5 * run.q_heads(), huge = 9 * run.q_heads() + 1;
  for (int i = 0; i < dim; ++i) {
    run.q()[poisoned * dim + i] = Bf16FromFloat(std::numeric_limits<float>::quiet_NaN());
  }
  for (int i = 0; i < dim; ++i) {
    Bf16& x = run.q()[huge * dim + i];
    x = Bf16FromFloat(Bf16ToFloat(x) * 1e4f);
  }
  run.Upload();
  run.Run();
  const std::vector<float> after = run.Out();
  const std::vector<float> lse = run.Lse();
  EXPECT_TRUE(std::isnan(after[poisoned * dim]));
  for (int row = 0; row < run.rows(); ++row) {
    if (row == poisoned || row == huge) continue;
    ASSERT_LE(run.RowError(row, after, lse), 5e-4) << "row " << row;
  }
  for (int i = 0; i < dim; ++i) EXPECT_TRUE(std::isfinite(after[huge * dim + i]));
}

TEST(PrefillAttention, ReplaysFromAGraph) {
  CRUMB_NEEDS_DEVICE();
  PrefillOptions options;
  options.sequences = Ragged();
  PrefillCase run(options);
  run.Run();
  const std::vector<uint8_t> expected = run.OutBytes();
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_CUDA(PrefillAttention(run.Params(), stream));
  cudaGraph_t graph;
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable;
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  run.Run();
  ASSERT_CUDA(cudaMemset(run.Params().out, 0xff, expected.size()));
  ASSERT_CUDA(cudaGraphLaunch(executable, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(run.OutBytes(), expected);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(PrefillAttention, RefusesSizesItDoesNotServe) {
  PrefillAttentionParams p;
  p.shape.tile.tokens = 32;
  EXPECT_EQ(PrefillAttention(p, nullptr), cudaErrorInvalidValue);
  p.shape.tile.tokens = 64;
  p.shape.q_heads = 3;
  p.shape.kv_heads = 2;
  EXPECT_EQ(PrefillAttention(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
