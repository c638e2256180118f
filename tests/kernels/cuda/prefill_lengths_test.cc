// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Prefill at both ends of its range: a chunk of 8,192 tokens, and 100k tokens before a chunk.
#include <cmath>
#include <cstdio>

#include "kernels/bf16.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/prefill_case.h"

namespace crumb::kernels::cuda {
namespace {

constexpr PrefillMma kMmas[] = {PrefillMma::kAuto, PrefillMma::kWarp};

TEST(PrefillLengths, AChunkOf8192TokensBesideOneOfOne) {
  CRUMB_NEEDS_DEVICE();
  for (const PrefillMma mma : kMmas) {
    PrefillOptions options;
    options.mma = mma;
    options.sequences = {{64, 30, 100, 8192}, {64, 3, 0, 1}};
    PrefillCase run(options);
    run.Run();
    EXPECT_LE(run.WorstError(90), 5e-4);
  }
}

TEST(PrefillLengths, OneKeyOver100kFlatOnes) {
  CRUMB_NEEDS_DEVICE();
  for (const PrefillMma mma : kMmas) {
    for (const double value_std : {1.0, 1e-2, 1e-4}) {
      for (const double nats : {8.0, 12.0, 16.0}) {
        PrefillOptions options;
        options.mma = mma;
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
        std::printf("%.0f nats, V %.0e, mma %d: error %.2e\n", nats, value_std,
                    static_cast<int>(mma), error);
        // The wgmma path truncates sums after one large key: up to 5.8e-4 with values of 1e-4.
        EXPECT_LE(error, mma == PrefillMma::kWarp ? 5e-4 : 6e-4)
            << nats << " nats, V " << value_std << ", mma " << static_cast<int>(mma);
      }
    }
  }
}

}  // namespace
}  // namespace crumb::kernels::cuda
