// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Decode attention in the launch configurations of devices with less shared memory, older
// instructions and fewer SMs: every tile, with odd group sizes and several query tokens.
#include <cstdio>
#include <string>

#include "kernels/cuda/decode/decode_attention.h"
#include "kernels/cuda/decode/plan.h"
#include "tests/kernels/cuda/decode/decode_case.h"

namespace crumb::kernels::cuda {
namespace {

struct OtherDevice {
  const char* name;
  DeviceLimits limits;
};
constexpr OtherDevice kA100 = {"of8_0", {8, 108, 163 << 10}};
constexpr OtherDevice kAda = {"of8_9", {8, 128, 99 << 10}};
constexpr OtherDevice kBlackwell = {"of12_0", {12, 128, 99 << 10}};
constexpr OtherDevice kSmall = {"of8_6", {8, 20, 99 << 10}};

constexpr TileShape kTiles[] = {{64, 64, 64},  {64, 64, 32},   {64, 128, 128}, {64, 128, 64},
                                {64, 128, 32}, {64, 256, 128}, {64, 256, 64},  {64, 256, 32}};

std::string NameOf(const TileShape& tile) {
  return "d" + std::to_string(tile.head_dim) + "_G" + std::to_string(tile.group_size);
}

// Tiles of head_dim 256 in groups of 32 need at least 113 KB of shared memory.
bool HasRoom(const TileShape& tile, const DeviceLimits& limits) {
  return tile.head_dim != 256 || tile.group_size != 32 || limits.shared_bytes > 113 << 10;
}

// Query heads per KV head and query tokens.
struct QueryShape {
  int group;
  int q_tokens;
};
constexpr QueryShape kQueryShapes[] = {{4, 1}, {7, 1}, {3, 3}, {12, 1}, {5, 4}, {16, 2}};

DecodeOptions OptionsOf(const TileShape& tile, const QueryShape& query) {
  DecodeOptions options;
  options.tile = tile;
  options.kv_heads = 2;
  options.group = query.group;
  options.q_tokens = query.q_tokens;
  options.sequences = {{64, 3, 256}, {64, 17, 319}, {0, 0, 0}, {63, 0, 5}, {64, 9, 16}};
  options.seed = 31 * query.group + tile.head_dim + tile.group_size;
  return options;
}

class DecodeTiles : public testing::TestWithParam<TileShape> {};

// Bulk copies and 16-byte copies produce the same bits, with this device's shared memory and with
// less.
TEST_P(DecodeTiles, BothCopiesGiveTheSameBits) {
  CRUMB_NEEDS_DEVICE();
  for (const QueryShape& query : kQueryShapes) {
    for (const int shared_bytes : {0, 163 << 10, 99 << 10}) {
      DecodeOptions options = OptionsOf(GetParam(), query);
      options.form = DecodeForm::kPlanned;
      options.limits.shared_bytes = shared_bytes;
      if (shared_bytes != 0 && !HasRoom(options.tile, options.limits)) continue;
      DecodeCase bulk(options);
      bulk.Run();
      options.copy_path = CopyPath::kAsync16;
      DecodeCase async(options);
      async.Run();
      EXPECT_EQ(async.OutBytes(), bulk.OutBytes())
          << query.group << " heads, " << query.q_tokens << " tokens, " << shared_bytes << " bytes";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tiles, DecodeTiles, testing::ValuesIn(kTiles),
                         [](const auto& tile) { return NameOf(tile.param); });

class DecodeLimits : public testing::TestWithParam<std::tuple<TileShape, OtherDevice>> {};

TEST_P(DecodeLimits, AgreeWithTheOracle) {
  CRUMB_NEEDS_DEVICE();
  const auto [tile, device] = GetParam();
  for (const QueryShape& query : kQueryShapes) {
    DecodeOptions options = OptionsOf(tile, query);
    options.limits = device.limits;
    if (!HasRoom(tile, device.limits)) {
      DecodeCase refused(options);
      EXPECT_EQ(refused.Enqueue(nullptr), cudaErrorInvalidValue);
      continue;
    }
    DecodeCase run(options);
    run.Run();
    const double error = run.WorstError(60);
    std::printf("%s %s: %d heads, %d tokens: error %.2e\n", device.name, NameOf(tile).c_str(),
                query.group, query.q_tokens, error);
    EXPECT_LE(error, 5e-4) << query.group << " heads, " << query.q_tokens << " tokens";
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DecodeLimits,
                         testing::Combine(testing::ValuesIn(kTiles),
                                          testing::Values(kA100, kAda, kBlackwell, kSmall)),
                         [](const auto& both) {
                           return NameOf(std::get<0>(both.param)) + "_" +
                                  std::get<1>(both.param).name;
                         });

// A case that is small enough for compute-sanitizer.
TEST(DecodeCopies, LengthsAroundEveryBoundary) {
  CRUMB_NEEDS_DEVICE();
  for (const OtherDevice& device : {kA100, kBlackwell}) {
    for (const TileShape& tile : {TileShape{64, 64, 64}, {64, 128, 128}, {64, 256, 128}}) {
      for (const int group : {4, 12}) {
        DecodeOptions options = OptionsOf(tile, {group, 1});
        options.kv_heads = 1;
        options.sequences = {{64, 5, 257}, {1, 0, 0}, {64, 0, 65}, {64, 1, 319}};
        options.limits = device.limits;
        DecodeCase run(options);
        run.Run();
        EXPECT_LE(run.WorstError(24), 5e-4) << device.name << ", d " << tile.head_dim;
      }
    }
  }
}

// Shared memory determines the warps of a block and the tiles of each warp (docs/kernels/cuda.md).
// The test needs no device.
TEST(DecodeLaunchOf, SharedMemoryDecidesWarpsAndStages) {
  struct Expected {
    TileShape tile;
    DeviceLimits limits;
    int warps;
    int stages;
  };
  const DeviceLimits a100 = kA100.limits, ada = kAda.limits;
  const Expected all[] = {{{64, 64, 64}, ada, 12, 3},    {{64, 128, 128}, ada, 8, 2},
                          {{64, 256, 128}, ada, 4, 2},   {{64, 64, 64}, a100, 12, 4},
                          {{64, 128, 128}, a100, 12, 2}, {{64, 256, 128}, a100, 8, 2}};
  for (const Expected& expected : all) {
    DecodeShape shape;
    shape.tile = expected.tile;
    shape.q_heads = 4;
    DecodeLaunch launch;
    ASSERT_EQ(LaunchOf(shape, DecodeForm::kAuto, expected.limits, &launch), cudaSuccess);
    EXPECT_EQ(launch.warps, expected.warps) << NameOf(shape.tile);
    EXPECT_EQ(launch.stages, expected.stages) << NameOf(shape.tile);
    EXPECT_LE(launch.shared_bytes, static_cast<size_t>(expected.limits.shared_bytes));
    EXPECT_EQ(launch.blocks, expected.limits.processors);
    EXPECT_EQ(LaunchOf(shape, DecodeForm::kClusters, expected.limits, &launch),
              cudaErrorInvalidValue);
  }
  DecodeShape none;
  DecodeLaunch launch;
  EXPECT_EQ(LaunchOf(none, DecodeForm::kAuto, {8, 1, 16 << 10}, &launch), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
