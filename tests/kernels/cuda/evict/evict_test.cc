// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/evict/evict.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/quantize.h"
#include "kernels/tile_codec.h"
#include "tests/kernels/cuda/evict/evict_case.h"
#include "tests/kernels/cuda/pages/crc32c_oracle.h"

namespace crumb::kernels::cuda {
namespace {

const TileShape kShapes[] = {{64, 128, 128}, {64, 128, 64},  {64, 128, 32}, {64, 64, 64},
                             {64, 64, 32},   {64, 256, 128}, {64, 256, 64}, {64, 256, 32}};

// The ways to multiply rows by R on several devices: with less shared memory R passes in parts and
// fewer warpgroups share it, below compute capability 9 there are no bulk copies, from 10 on there
// is no wgmma.
struct EvictWay {
  const char* name;
  RotatePath path = RotatePath::kAuto;
  DeviceLimits limits;
};
constexpr EvictWay kWays[] = {{"auto", RotatePath::kAuto, {}},
                              {"warp", RotatePath::kWarp, {}},
                              {"of8_0", RotatePath::kAuto, {8, 108, 163 << 10}},
                              {"of8_6", RotatePath::kAuto, {8, 20, 99 << 10}},
                              {"of8_9", RotatePath::kAuto, {8, 128, 99 << 10}},
                              {"of10_0", RotatePath::kAuto, {10, 0, 0}},
                              {"of12_0", RotatePath::kAuto, {12, 0, 99 << 10}}};

class EvictWays : public testing::TestWithParam<EvictWay> {
 protected:
  // Covariances of head_dim 256 need 152 to 155 KB with rows and checksums.
  static bool HasRoom(const TileShape& shape) {
    const int bytes = GetParam().limits.shared_bytes;
    return shape.head_dim < 256 || bytes == 0 || bytes > 155 << 10;
  }
  static void CompareCrumb(Rows rows_are, bool metric);
};
INSTANTIATE_TEST_SUITE_P(Ways, EvictWays, testing::ValuesIn(kWays),
                         [](const auto& way) { return way.param.name; });

TEST(EvictWindows, NaiveIsTheCpuBitForBit) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const Rows rows : {Rows::kNormal, Rows::kOutliers, Rows::kExtreme}) {
      for (const float clip : {0.0f, 0.96f, 0.5f, 0.01f}) {
        if (clip == 0.01f && rows != Rows::kNormal) continue;  // nearly all are beyond it
        EvictOptions options;
        options.tile = shape;
        options.rotated = options.centred = false;
        options.k_clip = options.v_clip = clip;
        options.rows = rows;
        options.windows = 5;
        EvictCase run(options);
        run.Run(7);
        std::vector<uint32_t> status;
        const std::vector<uint8_t> expected = run.Expected(&status);
        size_t different = 0;
        for (size_t i = 0; i < expected.size(); ++i) different += expected[i] != run.tiles()[i];
        EXPECT_EQ(different, 0u) << "d " << shape.head_dim << " G " << shape.group_size << " rows "
                                 << static_cast<int>(rows) << " clip " << clip;
        EXPECT_EQ(run.status(), status);
      }
    }
  }
}

TEST_P(EvictWays, RotatedCodesAgreeWithTheCpu) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    EvictOptions options;
    options.tile = shape;
    options.path = GetParam().path;
    options.limits = GetParam().limits;
    options.rows = Rows::kOutliers;
    options.layers = 3;
    options.windows = 12;
    options.position_blocks = 3;
    EvictCase run(options);
    run.Run(options.windows);
    std::vector<uint32_t> status;
    const std::vector<uint8_t> expected = run.Expected(&status);
    size_t codes = 0;
    const size_t different = DifferentCodes(shape, expected, run.tiles(), &codes);
    std::printf("%s d %d G %d: %zu of %zu codes differ, error %.1e\n", GetParam().name,
                shape.head_dim, shape.group_size, different, codes,
                static_cast<double>(different) / static_cast<double>(codes));
    EXPECT_LE(static_cast<double>(different), 1e-5 * static_cast<double>(codes) + 1);
    EXPECT_EQ(run.status(), status);
  }
}

TEST_P(EvictWays, NaiveIsTheCpuBitForBit) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    EvictOptions options;
    options.tile = shape;
    options.path = GetParam().path;
    options.limits = GetParam().limits;
    options.rotated = options.centred = false;
    options.rows = Rows::kExtreme;
    options.windows = 5;
    EvictCase run(options);
    run.Run(options.windows);
    std::vector<uint32_t> status;
    EXPECT_EQ(run.Expected(&status), run.tiles()) << "d " << shape.head_dim;
    EXPECT_EQ(run.status(), status);
  }
}

// There are more matrices than any GPU has SMs, so blocks go from one matrix to the next.
TEST(EvictWindows, BlocksGoFromMatrixToMatrix) {
  CRUMB_NEEDS_DEVICE();
  for (const int windows : {1, 5}) {
    EvictOptions options;
    options.tile = {64, 64, 64};
    options.layers = 60;
    options.windows = windows;
    EvictCase run(options);
    run.Run(windows);
    std::vector<uint32_t> status;
    const std::vector<uint8_t> expected = run.Expected(&status);
    size_t codes = 0;
    const size_t different = DifferentCodes(options.tile, expected, run.tiles(), &codes);
    EXPECT_LE(static_cast<double>(different), 1e-5 * static_cast<double>(codes) + 1);
    EXPECT_EQ(run.status(), status);
  }
}

// At most 1 % of rows differ, and the weighted errors are as large as the CPU's. The sums of a
// metric are made of halves: there the last bit of a scale or minimum may differ in 10 % of the
// rows (a simulation of the halves has 4 %).
void EvictWays::CompareCrumb(Rows rows_are, bool metric) {
  for (const TileShape& shape : kShapes) {
    EvictOptions options;
    options.tile = shape;
    options.method = Method::kCrumb;
    options.path = GetParam().path;
    options.limits = GetParam().limits;
    options.k_clip = options.v_clip = 0.92f;
    options.rows = rows_are;
    options.metric = metric;
    options.windows = shape.head_dim == 128 ? 16 : 6;
    options.position_blocks = 2;
    EvictCase run(options);
    if (!HasRoom(shape)) {
      EXPECT_EQ(EvictWindows(run.Params(), nullptr, {options.path, options.limits}),
                cudaErrorInvalidConfiguration);
      continue;
    }
    run.Run(options.windows);
    std::vector<uint32_t> status;
    const std::vector<uint8_t> expected = run.Expected(&status);
    size_t different = 0, in_codes = 0, rows = 0;
    double error = 0.0, expected_error = 0.0;
    const int dim = shape.head_dim;
    for (int w = 0; w < options.windows; ++w) {
      for (size_t m = 0; m < run.matrices(); ++m) {
        const std::vector<Bf16> window = run.WindowOf(w, m);
        const size_t at = (w * run.matrices() + m) * shape.int2_bytes();
        const uint8_t *got = run.tiles().data() + at, *want = expected.data() + at;
        for (int row = 0; row < 128; ++row) {
          const TilePart part = row < 64 ? TilePart::kKey : TilePart::kValue;
          const RowTransform transform = run.HostTransform(row / 64, w, m);
          different += RowDiffers(shape, got, want, part, row % 64);
          in_codes += CodesDiffer(shape, got, want, part, row % 64);
          ++rows;
          const std::vector<double> y = ExactRow(&window[row * dim], dim, transform);
          error += WeightedError(shape, got, part, row % 64, y, transform.feedback);
          expected_error += WeightedError(shape, want, part, row % 64, y, transform.feedback);
        }
      }
    }
    std::printf(
        "crumb %s d %d G %d rows %d metric %d: %zu of %zu rows differ, %zu of them in codes, "
        "weighted error "
        "%.5f of the CPU's, error %.1e\n",
        GetParam().name, dim, shape.group_size, static_cast<int>(rows_are), metric, different, rows,
        in_codes, error / expected_error, static_cast<double>(different) / rows);
    EXPECT_LE(static_cast<double>(in_codes), 0.01 * static_cast<double>(rows));
    // In a metric nearly every difference is one of rounding to fp16, and a row has two such
    // numbers per group: up to 16.
    EXPECT_LE(static_cast<double>(different), (metric ? 0.12 : 0.01) * static_cast<double>(rows));
    EXPECT_NEAR(error / expected_error, 1.0, 2e-3);
    EXPECT_EQ(run.status(), status);
  }
}

// The thresholds of these rows are found among halves.
TEST_P(EvictWays, CrumbAgreesWithTheCpu) {
  CRUMB_NEEDS_DEVICE();
  CompareCrumb(Rows::kNormal, false);
}

// The thresholds of these rows are found among floats.
TEST_P(EvictWays, CrumbAgreesWithTheCpuOnOutliers) {
  CRUMB_NEEDS_DEVICE();
  CompareCrumb(Rows::kOutliers, false);
}

TEST_P(EvictWays, CrumbAgreesWithTheCpuInAMetric) {
  CRUMB_NEEDS_DEVICE();
  CompareCrumb(Rows::kNormal, true);
  CompareCrumb(Rows::kOutliers, true);
}

// A ratio in the metric is another one than in the identity's: without weights most rows differ.
TEST(EvictWindows, WeightsChangeTheScales) {
  CRUMB_NEEDS_DEVICE();
  EvictOptions options;
  options.method = Method::kCrumb;
  options.metric = true;
  EvictCase run(options);
  run.Run(options.windows);
  options.metric = false;
  EvictCase other(options);
  std::vector<uint32_t> status;
  const std::vector<uint8_t> with = run.tiles(), without = other.Expected(&status);
  size_t different = 0, rows = 0;
  for (size_t at = 0; at < with.size(); at += options.tile.int2_bytes()) {
    for (int row = 0; row < 64; ++row, ++rows) {
      different += RowDiffers(options.tile, &with[at], &without[at], TilePart::kKey, row);
    }
  }
  EXPECT_GT(different, rows * 9 / 10);
}

// Without feedback and rotation only the last bit of a ratio may differ.
TEST(EvictWindows, CrumbWithoutConstantsAgreesWithTheCpu) {
  CRUMB_NEEDS_DEVICE();
  for (const Rows rows : {Rows::kNormal, Rows::kExtreme}) {
    EvictOptions options;
    options.method = Method::kCrumb;
    options.rotated = options.centred = options.feedback = false;
    options.rows = rows;
    options.windows = 18;
    EvictCase run(options);
    run.Run(options.windows);
    std::vector<uint32_t> status;
    const std::vector<uint8_t> expected = run.Expected(&status);
    size_t codes = 0;
    const size_t different = DifferentCodes(options.tile, expected, run.tiles(), &codes);
    EXPECT_LE(different, codes / 2000) << "rows " << static_cast<int>(rows);
    EXPECT_EQ(run.status(), status);
  }
}

TEST(EvictWindows, RowsThatAreNotFiniteDoNotSpread) {
  CRUMB_NEEDS_DEVICE();
  for (const Method method : {Method::kOscar, Method::kCrumb}) {
    EvictOptions options;
    options.method = method;
    EvictCase run(options);
    run.Run(options.windows);
    const std::vector<uint8_t> clean = run.tiles();
    EXPECT_EQ(run.status(), std::vector<uint32_t>(options.windows, 0));
    std::mt19937 random(3);
    // The row is in slot `slot` of the first matrix's K ring, in the second window.
    const int dim = options.tile.head_dim, slot = 30;
    Bf16* row = run.rows().data() + (run.matrices() * 2 * kEvictRing + slot) * dim;
    for (const uint16_t bits : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
      const Bf16 was = row[random() % dim];
      Bf16& at = row[random() % dim];
      const Bf16 before = at;
      at.bits = bits;
      run.UploadRows();
      run.Run(options.windows);
      EXPECT_EQ(run.status(), (std::vector<uint32_t>{0, kStatusNonFinite, 0}));
      int different = 0;
      for (int w = 0; w < options.windows; ++w) {
        for (size_t m = 0; m < run.matrices(); ++m) {
          const size_t tile = (w * run.matrices() + m) * options.tile.int2_bytes();
          for (int t = 0; t < 128; ++t) {
            const TilePart part = t < 64 ? TilePart::kKey : TilePart::kValue;
            if (!RowDiffers(options.tile, clean.data() + tile, run.tiles().data() + tile, part,
                            t % 64)) {
              continue;
            }
            ++different;
            EXPECT_TRUE(w == 1 && m == 0 && t < 64);
            for (int i = 0; i < dim; ++i) {
              EXPECT_EQ(Dequantized(options.tile, run.tiles().data() + tile, part, t, i), 0.0);
            }
          }
        }
      }
      EXPECT_EQ(different, 1) << "bits " << bits << " was " << was.bits;
      at = before;
    }
  }
}

// No input gives a tile that is not finite, with either method, and the status is the CPU's.
TEST(EvictWindows, ExtremeRowsStayFiniteAndAreReported) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const Method method : {Method::kOscar, Method::kCrumb}) {
      EvictOptions options;
      options.tile = shape;
      options.method = method;
      options.rows = Rows::kExtreme;
      options.windows = 4;
      EvictCase run(options);
      run.Run(options.windows);
      std::vector<uint32_t> status;
      run.Expected(&status);
      EXPECT_EQ(run.status(), status);
      for (size_t at = 0; at < run.tiles().size(); at += shape.int2_bytes()) {
        for (size_t i = 2 * shape.code_bytes(); i < shape.int2_bytes(); i += 2) {
          uint16_t half;
          std::memcpy(&half, &run.tiles()[at + i], 2);
          ASSERT_LT(half & 0x7fff, 0x7c00);
        }
      }
    }
  }
}

TEST(EvictWindows, ConstantRowsAreExactToFp16) {
  CRUMB_NEEDS_DEVICE();
  for (const Method method : {Method::kOscar, Method::kCrumb}) {
    for (const float value : {0.0f, 1.0f, -3.140625f, 1024.0f, 0x1p-24f, -65280.0f}) {
      EvictOptions options;
      options.method = method;
      options.rotated = options.centred = false;
      EvictCase run(options);
      for (Bf16& x : run.rows()) x = Bf16FromFloat(value);
      run.UploadRows();
      run.Run(options.windows);
      EXPECT_EQ(run.status(), std::vector<uint32_t>(options.windows, 0));
      for (int t = 0; t < 64; ++t) {
        for (int i = 0; i < 128; ++i) {
          ASSERT_EQ(Dequantized(options.tile, run.tiles().data(), TilePart::kKey, t, i), value);
        }
      }
    }
  }
}

TEST(EvictWindows, SumsAreThoseOfTheBytes) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const Method method : {Method::kOscar, Method::kCrumb}) {
      EvictOptions options;
      options.tile = shape;
      options.method = method;
      options.windows = 5;
      EvictCase run(options);
      // the second call finds the workspace as the first one did
      for (int round = 0; round < 2; ++round) {
        run.Run(options.windows + round);
        const std::vector<uint32_t> sums = run.sums();
        for (size_t i = 0; i < sums.size(); ++i) {
          ASSERT_EQ(sums[i],
                    Crc32cOracle(run.tiles().data() + i * shape.int2_bytes(), shape.int2_bytes()))
              << "d " << shape.head_dim << " G " << shape.group_size << " tile " << i;
        }
        for (const uint64_t word : run.workspace()) ASSERT_EQ(word, 0u);
      }
    }
  }
}

// Fills the shared memory that the next kernel finds with NaN.
void PoisonSharedMemory() {
  constexpr int kDim = 128, kWindows = 1024;
  const DeviceBuffer ones(4 * std::max(EvictRotationBytes(kDim), size_t{1} << 20));
  const DeviceBuffer address(std::vector<uint64_t>(kWindows, ones.address()));
  const DeviceBuffer tiles(size_t{1} << 20);
  const DeviceBuffer tile(std::vector<uint64_t>(kWindows, tiles.address()));
  const DeviceBuffer begin(std::vector<int32_t>(kWindows, 0));
  const DeviceBuffer count(std::vector<int32_t>{kWindows});
  EvictParams p;
  p.method = Method::kCrumb;
  p.windows_max = kWindows;
  p.windows = count.as<int32_t>();
  p.ring_address = address.as<uint64_t>();
  p.ring_begin = begin.as<int32_t>();
  p.ring_token_stride = 2 * kDim;
  p.tile_address = tile.as<uint64_t>();
  p.k.rotation = p.v.rotation = ones.as<EvictRotation>();
  p.k.feedback = p.v.feedback = ones.as<EvictFeedback>();
  ASSERT_CUDA(EvictWindows(p, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
}

// The bytes depend neither on the grid nor on the initial contents of shared memory.
TEST(EvictWindows, SameBytesOnEveryRun) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& shape : kShapes) {
    for (const RotatePath path : {RotatePath::kAuto, RotatePath::kWarp}) {
      for (const Method method : {Method::kOscar, Method::kCrumb}) {
        for (const Rows rows : {Rows::kNormal, Rows::kOutliers}) {
          EvictOptions options;
          options.tile = shape;
          options.method = method;
          options.path = path;
          options.k_clip = options.v_clip = 0.92f;
          options.rows = rows;
          options.windows = 9;
          EvictCase run(options);
          run.Run(9);
          const std::vector<uint8_t> first = run.tiles();
          const std::vector<uint32_t> sums = run.sums();
          for (int round = 0; round < 12; ++round) {
            if (round % 4 == 3) PoisonSharedMemory();
            run.Run(round % 2 == 0 ? 9 : 40);  // another grid
            ASSERT_EQ(run.tiles(), first)
                << "d " << shape.head_dim << " G " << shape.group_size << " path "
                << static_cast<int>(path) << " rows " << static_cast<int>(rows) << " run " << round;
            ASSERT_EQ(run.sums(), sums);
          }
        }
      }
    }
  }
}

// List entries beyond the number of windows are not read.
TEST(EvictWindows, FewerWindowsThanThereCanBe) {
  CRUMB_NEEDS_DEVICE();
  constexpr int kMost = 40;
  for (const RotatePath path : {RotatePath::kAuto, RotatePath::kWarp}) {
    for (const Method method : {Method::kOscar, Method::kCrumb}) {
      EvictOptions options;
      options.method = method;
      options.path = path;
      options.windows = 9;
      EvictCase run(options);
      run.Run(9);
      const std::vector<uint8_t> all = run.tiles();
      const EvictParams plain = run.Params();
      const auto lengthen = [&]<typename T>(const T* list, T bad) {
        std::vector<T> longer(kMost, bad);
        EXPECT_EQ(cudaMemcpy(longer.data(), list, 9 * sizeof(T), cudaMemcpyDeviceToHost),
                  cudaSuccess);
        return longer;
      };
      const DeviceBuffer ring(lengthen(plain.ring_address, uint64_t{16}));
      const DeviceBuffer tile(lengthen(plain.tile_address, uint64_t{128}));
      const DeviceBuffer begin(lengthen(plain.ring_begin, int32_t{1} << 30));
      const DeviceBuffer block(lengthen(plain.position_block, int32_t{1} << 30));
      const DeviceBuffer status(std::vector<uint32_t>(kMost, 0));
      const size_t tile_bytes = run.matrices() * options.tile.int2_bytes();
      for (const int windows : {0, 1, 4, 9}) {
        for (const int most : {9, 10, kMost}) {
          const DeviceBuffer count(std::vector<int32_t>{windows});
          EvictParams p = plain;
          p.windows = count.as<int32_t>();
          p.windows_max = most;
          p.ring_address = ring.as<uint64_t>();
          p.tile_address = tile.as<uint64_t>();
          p.ring_begin = begin.as<int32_t>();
          p.position_block = block.as<int32_t>();
          p.status = status.as<uint32_t>();
          run.FillTiles();
          ASSERT_CUDA(EvictWindows(p, nullptr, {path, options.limits}));
          ASSERT_CUDA(cudaDeviceSynchronize());
          std::vector<uint8_t> expected(all.size(), 0xff);
          std::copy_n(all.begin(), windows * tile_bytes, expected.begin());
          run.DownloadTiles();
          ASSERT_EQ(run.tiles(), expected) << windows << " of " << most;
          EXPECT_EQ(status.Download<uint32_t>(), std::vector<uint32_t>(kMost, 0));
          const std::vector<uint32_t> sums = run.sums();
          for (size_t i = 0; i < sums.size(); ++i) {
            const uint8_t* bytes = all.data() + i * options.tile.int2_bytes();
            const bool there = i < windows * run.matrices();
            ASSERT_EQ(sums[i], there ? Crc32cOracle(bytes, options.tile.int2_bytes()) : ~0u);
          }
          for (const uint64_t word : run.workspace()) ASSERT_EQ(word, 0u);
        }
      }
    }
  }
}

TEST(EvictWindows, RefusesWhatItDoesNotServe) {
  EvictParams p;
  p.tile.tokens = 32;
  EXPECT_EQ(EvictWindows(p, nullptr), cudaErrorInvalidValue);
  p.tile.tokens = 64;
  uint32_t sums = 0;
  p.checksums = &sums;
  EXPECT_EQ(EvictWindows(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
