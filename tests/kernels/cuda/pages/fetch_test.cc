// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

#include <random>

#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/pages/crc32c_oracle.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kLayers = 3;

// Pages lie at scattered places of pinned host memory and in the opposite order in device memory.
// The layers of a page are further apart in host memory than in the slots. Every third page is in
// its slot already.
class FetchCase {
 public:
  FetchCase(size_t tile_bytes, int pages, int tiles_per_layer)
      : tile_bytes_(tile_bytes), pages_(pages), tiles_(tiles_per_layer) {
    std::mt19937 random(static_cast<uint32_t>(tile_bytes + pages));
    from_bytes_ = FromStride() * kLayers + 48;
    void* host = nullptr;
    EXPECT_EQ(cudaHostAlloc(&host, from_bytes_ * pages, cudaHostAllocDefault), cudaSuccess);
    host_ = static_cast<uint8_t*>(host);
    for (size_t i = 0; i < from_bytes_ * pages; ++i) host_[i] = static_cast<uint8_t>(random());
    slots_.Upload(Expected());
    std::vector<uint64_t> from, to;
    std::vector<int64_t> strides;
    for (int run = 0; run < pages; ++run) {
      to.push_back(slots_.address() + SlotOf(run));
      from.push_back(InPlace(run) ? to.back()
                                  : reinterpret_cast<uint64_t>(host_ + from_bytes_ * run));
      strides.push_back(InPlace(run) ? SlotStride() : FromStride());
      if (!InPlace(run)) {
        EXPECT_EQ(cudaMemset(reinterpret_cast<void*>(to.back()), 0xee, SlotStride() * kLayers),
                  cudaSuccess);
      }
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int run = 0; run < pages; ++run) {
        for (int i = 0; i < tiles_; ++i) {
          sums_.push_back(Crc32cOracle(At(run, layer, i), tile_bytes));
        }
      }
    }
    from_.Upload(from);
    to_.Upload(to);
    strides_.Upload(strides);
    device_sums_.Upload(sums_);
    status_.Upload(std::vector<uint32_t>(pages, 0));
    params.tile_bytes = tile_bytes;
    params.pages = pages;
    params.tiles_per_layer = tiles_per_layer;
    params.from = from_.as<uint64_t>();
    params.from_layer_stride = strides_.as<int64_t>();
    params.to = to_.as<uint64_t>();
    params.to_layer_stride = SlotStride();
    params.checksums = device_sums_.as<uint32_t>();
    params.checksums_layer_stride = pages * tiles_per_layer;
    params.status = status_.as<uint32_t>();
  }
  ~FetchCase() { cudaFreeHost(host_); }

  uint8_t* At(int run, int layer, int tile) {
    return host_ + from_bytes_ * run + FromStride() * layer + tile_bytes_ * tile;
  }
  // Returns the contents of the slots after all pages have arrived.
  std::vector<uint8_t> Expected() {
    std::vector<uint8_t> slots(SlotStride() * kLayers * pages_);
    for (int run = 0; run < pages_; ++run) {
      for (int layer = 0; layer < kLayers; ++layer) {
        std::memcpy(&slots[SlotOf(run) + SlotStride() * layer], At(run, layer, 0), SlotStride());
      }
    }
    return slots;
  }
  void FetchLayers(int begin, int end) {
    params.layer_begin = begin;
    params.layer_end = end;
    ASSERT_CUDA(FetchTiles(params, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
  }
  void FlipInSlot(int run) {
    std::vector<uint8_t> slots = Slots();
    slots[SlotOf(run) + SlotStride()] ^= 1;
    slots_.Upload(slots);
  }
  bool InPlace(int run) const { return run % 3 == 2; }
  std::vector<uint8_t> Slots() const { return slots_.Download<uint8_t>(); }
  std::vector<uint32_t> Status() const { return status_.Download<uint32_t>(); }

  FetchParams params;

 private:
  size_t SlotStride() const { return tile_bytes_ * tiles_; }
  size_t FromStride() const { return SlotStride() + 2 * tile_bytes_; }
  size_t SlotOf(int run) const { return SlotStride() * kLayers * (pages_ - 1 - run); }

  const size_t tile_bytes_;
  const int pages_;
  const int tiles_;
  size_t from_bytes_ = 0;
  uint8_t* host_ = nullptr;
  std::vector<uint32_t> sums_;
  DeviceBuffer slots_, from_, to_, strides_, device_sums_, status_;
};

TEST(FetchTiles, BringsAndSumsTilesOfEverySize) {
  CRUMB_NEEDS_DEVICE();
  for (const size_t tile_bytes :
       {16, 496, 512, 528, 1280, 2560, 4592, 4608, 4624, 5120, 9216, 10240, 12288, 16384, 32768}) {
    SCOPED_TRACE(tile_bytes);
    FetchCase run(tile_bytes, 23, 5);
    run.params.blocks = tile_bytes % 3;
    run.FetchLayers(0, 1);
    run.FetchLayers(1, kLayers);
    EXPECT_EQ(run.Slots(), run.Expected());
    EXPECT_EQ(run.Status(), std::vector<uint32_t>(23, 0));
  }
}

// A change of any single bit of a tile is reported, and nothing else is.
TEST(FetchTiles, ReportsThePageThatWasChanged) {
  CRUMB_NEEDS_DEVICE();
  for (const size_t tile_bytes : {2560, 4608, 16384}) {
    SCOPED_TRACE(tile_bytes);
    const int pages = 40, tiles = 8;
    FetchCase run(tile_bytes, pages, tiles);
    std::mt19937 random(5);
    std::vector<uint32_t> expected(pages, 0);
    for (int i = 0; i < pages; i += 4) {
      if (run.InPlace(i)) continue;
      const int layer = static_cast<int>(random() % kLayers);
      run.At(i, layer, static_cast<int>(random() % tiles))[random() % tile_bytes] ^=
          1u << random() % 8;
      expected[i] = 1;
    }
    run.FetchLayers(0, kLayers);
    EXPECT_EQ(run.Status(), expected);
    EXPECT_EQ(run.Slots(), run.Expected());
  }
}

TEST(FetchTiles, LooksAtTilesWhereTheyLie) {
  CRUMB_NEEDS_DEVICE();
  FetchCase run(4608, 6, 2);
  const std::vector<uint8_t> expected = run.Expected();
  run.At(2, 1, 0)[17] ^= 4;  // this page lies in its slot already and is verified there
  run.FetchLayers(0, kLayers);
  EXPECT_EQ(run.Status(), std::vector<uint32_t>(6, 0));
  EXPECT_EQ(run.Slots(), expected);
  run.FlipInSlot(5);
  run.FetchLayers(0, kLayers);
  EXPECT_EQ(run.Status(), (std::vector<uint32_t>{0, 0, 0, 0, 0, 1}));
  run.FlipInSlot(0);
  run.params.from = nullptr;
  run.FetchLayers(0, kLayers);
  EXPECT_EQ(run.Status(), (std::vector<uint32_t>{1, 0, 0, 0, 0, 1}));
}

TEST(FetchTiles, RefusesOddSizes) {
  for (const size_t tile_bytes : {size_t{0}, size_t{8}, size_t{4600}, size_t{2} << 20}) {
    FetchParams p;
    p.tile_bytes = tile_bytes;
    p.pages = 1;
    EXPECT_EQ(FetchTiles(p, nullptr), cudaErrorInvalidValue);
  }
  FetchParams backwards;
  backwards.tile_bytes = 4608;
  backwards.layer_begin = 2;
  EXPECT_EQ(FetchTiles(backwards, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
