// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/verify.h"

#include <random>

#include "tests/kernels/cuda/crc32c_oracle.h"
#include "tests/kernels/cuda/device_buffer.h"

namespace crumb::kernels::cuda {
namespace {

TEST(Crc32cOracle, HasThePublishedValue) {
  const char* digits = "123456789";
  EXPECT_EQ(Crc32cOracle(reinterpret_cast<const uint8_t*>(digits), 9), 0xe3069283u);
}

// Runs of random tiles at scattered places.
struct VerifyCase {
  VerifyCase(size_t tile_bytes, int runs, int tiles_per_run) {
    std::mt19937 random(static_cast<uint32_t>(tile_bytes + runs));
    const size_t run_bytes = tile_bytes * tiles_per_run, gap = 48;
    bytes.resize(runs * (run_bytes + gap));
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    std::vector<uint64_t> addresses;
    data.Upload(bytes);
    for (int run = runs - 1; run >= 0; --run) {
      addresses.push_back(data.address() + run * (run_bytes + gap));
      for (int i = 0; i < tiles_per_run; ++i) {
        sums.push_back(
            Crc32cOracle(bytes.data() + run * (run_bytes + gap) + i * tile_bytes, tile_bytes));
      }
    }
    address.Upload(addresses);
    device_sums.Upload(sums);
    found.Allocate(4 * sums.size());
    status.Upload(std::vector<uint32_t>(runs, 0));
    params.tile_bytes = tile_bytes;
    params.runs = runs;
    params.tiles_per_run = tiles_per_run;
    params.run_address = address.as<uint64_t>();
    params.sums = device_sums.as<uint32_t>();
    params.status = status.as<uint32_t>();
    params.found = found.as<uint32_t>();
  }

  std::vector<uint8_t> bytes;
  std::vector<uint32_t> sums;
  DeviceBuffer data, address, device_sums, found, status;
  VerifyParams params;
};

TEST(VerifyTiles, FindsTheSumsOfTheBytes) {
  CRUMB_NEEDS_DEVICE();
  for (const size_t tile_bytes :
       {16, 128, 496, 512, 528, 1280, 2560, 3072, 4608, 5120, 6144, 9216, 10240, 12288}) {
    VerifyCase run(tile_bytes, 37, 5);
    ASSERT_CUDA(VerifyTiles(run.params, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(run.found.Download<uint32_t>(), run.sums) << tile_bytes;
    EXPECT_EQ(run.status.Download<uint32_t>(), std::vector<uint32_t>(37, 0)) << tile_bytes;
  }
}

// Any single bit of a tile, and nothing else, sets that tile's bit.
TEST(VerifyTiles, ReportsTheTileThatWasChanged) {
  CRUMB_NEEDS_DEVICE();
  const int runs = 24, tiles = 40;
  VerifyCase run(4608, runs, tiles);
  std::mt19937 random(5);
  std::vector<uint8_t> changed = run.bytes;
  std::vector<uint32_t> expected(runs, 0);
  for (int i = 0; i < runs; i += 3) {
    const int tile = static_cast<int>(random() % tiles);
    const size_t begin = (runs - 1 - i) * (size_t{4608} * tiles + 48) + size_t{4608} * tile;
    changed[begin + random() % 4608] ^= 1u << random() % 8;
    expected[i] = 1u << std::min(tile, 31);
  }
  run.data.Upload(changed);
  run.params.found = nullptr;
  ASSERT_CUDA(VerifyTiles(run.params, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(run.status.Download<uint32_t>(), expected);
}

TEST(VerifyTiles, RefusesOddSizes) {
  for (const size_t tile_bytes : {0, 8, 4600, 12304}) {
    VerifyParams p;
    p.tile_bytes = tile_bytes;
    p.runs = 1;
    EXPECT_EQ(VerifyTiles(p, nullptr), cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace crumb::kernels::cuda
