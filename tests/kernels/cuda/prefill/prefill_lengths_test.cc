// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Prefill at both ends of its range: a chunk of 8,192 tokens, and 100k tokens before a chunk.
#include <cmath>
#include <cstdio>
#include <utility>

#include "kernels/bf16.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/prefill/prefill_case.h"

namespace crumb::kernels::cuda {
namespace {

// The kernels of one shape that differ in how they round.
constexpr std::pair<PrefillMma, OutType> kVariants[] = {{PrefillMma::kAuto, OutType::kF32},
                                                        {PrefillMma::kAuto, OutType::kBf16},
                                                        {PrefillMma::kWarp, OutType::kF32}};

TEST(PrefillLengths, AChunkOf8192TokensBesideOneOfOne) {
  CRUMB_NEEDS_DEVICE();
  for (const auto& [mma, type] : kVariants) {
    PrefillOptions options;
    options.mma = mma;
    options.out_type = type;
    options.sequences = {{64, 30, 100, 8192}, {64, 3, 0, 1}};
    PrefillCase run(options);
    run.Run();
    EXPECT_LE(run.WorstOfBound(PrefillErrorBound(type, 1.0), 90), 1.0);
  }
}

TEST(PrefillLengths, OneKeyOver100kFlatOnes) {
  CRUMB_NEEDS_DEVICE();
  for (const auto& [mma, type] : kVariants) {
    for (const double value_std : {1.0, 1e-2, 1e-4}) {
      for (const double nats : {8.0, 12.0, 16.0}) {
        PrefillOptions options;
        options.mma = mma;
        options.out_type = type;
        options.kv_heads = 1;
        options.group = 2;
        options.sequences = {{64, 1562, 0, 3}};
        options.value_std = value_std;
        options.logit_std = 0.01;
        options.transforms = false;
        PrefillCase run(options);
        // Sets a constant K row whose logit is `nats` for the first query row.
        double sum = 0.0;
        for (int i = 0; i < 128; ++i) sum += Bf16ToFloat(run.q()[i]);
        WriteMeta(options.tile, TilePart::kKey, 21, 0, {0, Half(nats * std::sqrt(128.0) / sum)},
                  run.Tile(0, 311, 0));
        run.Upload();
        run.Run();
        const double error = run.RowError(0, run.Out(), run.Lse());
        const char* kernel = mma == PrefillMma::kWarp ? "warp"
                             : type == OutType::kF32  ? "auto, f32"
                                                      : "auto, bf16";
        std::printf("%.0f nats, V %.0e, %s: error %.2e\n", nats, value_std, kernel, error);
        // The wgmma path truncates sums after one large key: up to 5.8e-4 with values of 1e-4.
        const double bound = type == OutType::kBf16 ? 3e-3 : mma == PrefillMma::kWarp ? 5e-4 : 6e-4;
        EXPECT_LE(error, bound) << nats << " nats, V " << value_std << ", " << kernel;
      }
    }
  }
}

}  // namespace
}  // namespace crumb::kernels::cuda
