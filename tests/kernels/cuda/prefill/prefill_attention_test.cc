// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/prefill_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <tuple>
#include <utility>

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/prefill/prefill_case.h"

namespace crumb::kernels::cuda {
namespace {

// Sequences that begin and end around every boundary, with padding among them.
std::vector<ChunkLengths> Ragged() {
  return {{64, 7, 0, 130}, {0, 0, 0, 0},  {64, 1, 70, 33}, {10, 0, 0, 65},
          {64, 2, 3, 1},   {64, 0, 5, 9}, {0, 0, 0, 40},   {64, 11, 31, 5}};
}

struct Shape {
  int head_dim, group_size, kv_heads, group;
};

const char* NameOf(OutType type) { return type == OutType::kF32 ? "f32" : "bf16"; }

const char* NameOf(PrefillMma mma) { return mma == PrefillMma::kAuto ? "auto" : "warp"; }

// The kernels of one shape that differ in how they round.
constexpr std::pair<PrefillMma, OutType> kVariants[] = {{PrefillMma::kAuto, OutType::kF32},
                                                        {PrefillMma::kAuto, OutType::kBf16},
                                                        {PrefillMma::kWarp, OutType::kF32}};

class PrefillShapes : public testing::TestWithParam<std::tuple<Shape, PrefillMma>> {};

TEST_P(PrefillShapes, AgreesWithTheOracle) {
  CRUMB_NEEDS_DEVICE();
  const auto& [shape, mma] = GetParam();
  for (const double logit_std : {1.0, 2.0, 8.0}) {
    for (const OutType type : {OutType::kF32, OutType::kBf16}) {
      PrefillOptions options;
      options.mma = mma;
      options.tile = {64, shape.head_dim, shape.group_size};
      options.kv_heads = shape.kv_heads;
      options.group = shape.group;
      options.sequences = Ragged();
      options.logit_std = logit_std;
      options.out_type = type;
      options.seed = 3 + shape.group;
      PrefillCase run(options);
      run.Run();
      std::printf("d %d G %d g %d %s std %.0f %s: error %.2e\n", shape.head_dim, shape.group_size,
                  shape.group, NameOf(mma), logit_std, NameOf(type), run.WorstError(150));
      EXPECT_LE(run.WorstOfBound(PrefillErrorBound(type, logit_std), 150), 1.0);
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
        testing::Values(PrefillMma::kAuto, PrefillMma::kWarp)));

// BF16 outputs have kernels of their own, with and without a soft cap.
TEST(PrefillAttention, EveryTermOfTheLogit) {
  CRUMB_NEEDS_DEVICE();
  for (int mask = 0; mask < 128; ++mask) {
    PrefillOptions options;
    options.out_type = (mask & 64) != 0 ? OutType::kBf16 : OutType::kF32;
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
    EXPECT_LE(run.WorstOfBound(PrefillErrorBound(options.out_type, 1.0), 40), 1.0)
        << "mask " << mask;
  }
}

// Caps have a path for small logits and one for all, which steps choose for themselves.
TEST(PrefillAttention, CappedLogitsOfEveryHeadDim) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape shape :
       {TileShape{64, 64, 64}, TileShape{64, 128, 128}, TileShape{64, 256, 128}}) {
    for (const float cap : {1.0f, 4.0f, 8.0f, 30.0f, 50.0f}) {
      PrefillOptions options;
      options.tile = shape;
      options.out_type = OutType::kBf16;
      options.sequences = {{64, 9, 6, 70}, {64, 4, 0, 12}};
      options.logit_std = 2.0;
      options.soft_cap = cap;
      options.shift = options.offset = true;
      options.seed = shape.head_dim + static_cast<int>(cap);
      PrefillCase run(options);
      run.Run();
      EXPECT_LE(run.WorstOfBound(PrefillErrorBound(OutType::kBf16, 2.0), 60), 1.0)
          << "head_dim " << shape.head_dim << " cap " << cap;
    }
  }
}

TEST(PrefillAttention, TermsOfTheLogitAtEveryHeadDim) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape shape : {TileShape{64, 64, 32}, TileShape{64, 256, 64}}) {
    for (int mask = 0; mask < 16; ++mask) {
      PrefillOptions options;
      options.tile = shape;
      options.out_type = OutType::kBf16;
      options.group = mask % 2 == 0 ? 4 : 6;
      options.sequences = {{64, 5, 6, 30}, {64, 9, 0, 70}, {0, 0, 0, 12}};
      options.offset = (mask & 1) != 0;
      options.shift = (mask & 2) != 0;
      options.sink_logit = (mask & 4) != 0;
      options.transforms = (mask & 8) == 0;
      options.seed = mask;
      PrefillCase run(options);
      run.Run();
      EXPECT_LE(run.WorstOfBound(PrefillErrorBound(OutType::kBf16, 1.0), 40), 1.0)
          << "head_dim " << shape.head_dim << " mask " << mask;
    }
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
  const std::pair<TileShape, OutType> kernels[] = {{{64, 128, 128}, OutType::kF32},
                                                   {{64, 128, 128}, OutType::kBf16},
                                                   {{64, 64, 64}, OutType::kBf16},
                                                   {{64, 256, 128}, OutType::kBf16}};
  for (const auto& [tile, type] : kernels) {
    PrefillOptions options;
    options.tile = tile;
    options.out_type = type;
    for (const int fresh : {1, 31, 32, 33, 63, 64, 65, 129}) {
      for (const int pages : {0, 1, 5, 6, 7, 13}) {
        options.sequences.push_back({64, pages, 0, fresh});
      }
    }
    PrefillCase run(options);
    run.Run();
    EXPECT_LE(run.WorstOfBound(PrefillErrorBound(type, 1.0), 500), 1.0)
        << "head_dim " << tile.head_dim;
    const std::vector<uint8_t> bulk = run.OutBytes();
    run.Run();
    EXPECT_EQ(run.OutBytes(), bulk) << "a second run gave other bits";
  }
}

TEST(PrefillAttention, PaddedEntriesStayUntouched) {
  CRUMB_NEEDS_DEVICE();
  PrefillOptions options;
  options.sequences = {{64, 3, 0, 0}, {64, 2, 0, 37}, {0, 0, 0, 0}};
  PrefillCase alone(options);
  alone.Run();
  EXPECT_LE(alone.WorstError(60), 5e-4);
  // The grid's capacity beyond a sequence's tokens writes nothing: rows after the last one stay
  // poisoned.
  options.sequences = {{64, 3, 0, 0}, {0, 0, 0, 0}, {64, 0, 0, 300}};
  PrefillCase wide(options);
  wide.Run();
  EXPECT_LE(wide.WorstError(60), 5e-4);
}

TEST(PrefillAttention, SmallValuesAndPeaks) {
  CRUMB_NEEDS_DEVICE();
  for (const PrefillMma mma : {PrefillMma::kAuto, PrefillMma::kWarp}) {
    for (const double value_std : {1.0, 1e-2, 1e-4}) {
      for (const double nats : {0.0, 8.0, 14.0, 16.0}) {
        PrefillOptions options;
        options.mma = mma;
        options.kv_heads = 1;
        options.group = 2;
        options.sequences = {{64, 400, 0, 3}};
        options.value_std = value_std;
        options.logit_std = 0.01;
        options.transforms = false;
        PrefillCase run(options);
        if (nats > 0.0) {
          // Sets a constant K row whose logit is `nats` for the first query row.
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
        EXPECT_LE(error, 5e-4);
      }
    }
  }
}

// Writes a key whose logit is about `nats`: its codes follow the signs of the query. Returns the
// exact logit.
double PlaceKey(const TileShape& shape, const Bf16* q, int token, double nats, uint8_t* tile) {
  double sum = 0.0;
  for (int i = 0; i < shape.head_dim; ++i) {
    const double x = Bf16ToFloat(q[i]);
    WriteCode(shape, TilePart::kKey, token, i, x > 0.0 ? 3 : 0, tile);
    sum += std::abs(x);
  }
  const double root = std::sqrt(shape.head_dim);
  const uint16_t scale = Half(nats * root / 1.5 / sum);
  for (int y = 0; y < shape.groups(); ++y) {
    WriteMeta(shape, TilePart::kKey, token, y, {scale, Half(-1.5 * Fp16ToFloat(scale))}, tile);
  }
  return 1.5 * Fp16ToFloat(scale) * sum / root;
}

// One key has 21 to 93 % of its row, 2 to 15 times the weight of another in an earlier page. As the
// running max stays, its probability is rounded, with the scale of V that suffers most from it.
TEST(PrefillAttention, OneKeyThatHasMostOfARow) {
  CRUMB_NEEDS_DEVICE();
  const TileShape shapes[] = {
      {64, 128, 128}, {64, 128, 64}, {64, 128, 32}, {64, 64, 64}, {64, 256, 128}};
  for (const TileShape& shape : shapes) {
    for (const auto& [mma, type] : kVariants) {
      PrefillOptions options;
      options.tile = shape;
      options.mma = mma;
      options.out_type = type;
      options.kv_heads = 64;
      options.group = 1;
      options.sequences = {{64, 45, 0, 1}};
      options.logit_std = 2.0;
      options.transforms = false;
      options.seed = shape.head_dim + shape.group_size;
      PrefillCase run(options);
      std::mt19937 random(options.seed);
      for (int head = 0; head < options.kv_heads; ++head) {
        for (int page = 0; page < 45; ++page) {
          for (int t = 0; t < 64 * shape.groups(); ++t) {
            WriteMeta(shape, TilePart::kKey, t % 64, t / 64, {Half(1e-3), Half(-1.5e-3)},
                      run.Tile(0, page, head));
          }
        }
        const Bf16* q = run.q().data() + static_cast<size_t>(head) * shape.head_dim;
        const double ratio = 2.1 + random() % 1024 / 1024.0 * 13.1;
        const int page = 29 + static_cast<int>(random() % 16), token = random() % 64;
        const double before =
            PlaceKey(shape, q, random() % 64, 14.0 - std::log(ratio), run.Tile(0, page - 4, head));
        const double last = PlaceKey(shape, q, token, 14.0, run.Tile(0, page, head));
        const auto loss = [&](uint16_t scale) {
          const double weight = std::exp(last - before) * Fp16ToFloat(scale);
          return std::abs(Fp16ToFloat(Half(weight)) / weight - 1.0);
        };
        uint16_t worst = 0x3800;  // 0.5, the smallest
        for (uint16_t scale = 0x3800; scale < 0x3c00; ++scale) {
          if (loss(scale) > loss(worst)) worst = scale;
        }
        for (int y = 0; y < shape.groups(); ++y) {
          WriteMeta(shape, TilePart::kValue, token, y, {worst, Half(-1.5 * Fp16ToFloat(worst))},
                    run.Tile(0, page, head));
        }
      }
      run.Upload();
      run.Run();
      const double error = run.WorstError(64);
      std::printf("d %d G %d %s %s, one key: error %.2e\n", shape.head_dim, shape.group_size,
                  NameOf(mma), NameOf(type), error);
      EXPECT_LE(run.WorstOfBound(PrefillErrorBound(type, 2.0), 64), 1.0);
    }
  }
}

TEST(PrefillAttention, ManyRows) {
  CRUMB_NEEDS_DEVICE();
  const TileShape shapes[] = {{64, 128, 128}, {64, 128, 32}, {64, 64, 64}, {64, 256, 128}};
  for (const TileShape& shape : shapes) {
    for (const auto& [mma, type] : kVariants) {
      if (mma == PrefillMma::kAuto && shape.groups() > 1) continue;
      double worst = 0.0, of_bound = 0.0;
      for (int seed = 0; seed < 2; ++seed) {
        PrefillOptions options;
        options.tile = shape;
        options.mma = mma;
        options.out_type = type;
        options.kv_heads = 4;
        options.sequences = {{64, 9, 20, 37}, {64, 3, 0, 33}};
        options.logit_std = 2.0;
        options.seed = 1000 + seed;
        PrefillCase run(options);
        run.Run();
        const double error = run.WorstError(500);
        if (!(error <= worst)) worst = error;
        const double share = run.WorstOfBound(PrefillErrorBound(type, 2.0), 500);
        if (!(share <= of_bound)) of_bound = share;
      }
      std::printf("d %d G %d %s %s, many rows: error %.2e\n", shape.head_dim, shape.group_size,
                  NameOf(mma), NameOf(type), worst);
      EXPECT_LE(of_bound, 1.0);
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
