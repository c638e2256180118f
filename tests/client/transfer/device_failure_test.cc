// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Transfers of a cache in device memory of which single copies fail.
#include <memory>
#include <string>
#include <vector>

#include "crumb/transfer.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/simulated_device.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"
#include "tests/client/transfer/device_mirror.h"
#include "tests/client/transfer/engine_cache.h"

namespace crumb::client {
namespace {

using std::chrono::seconds;

// Tables of two launches, so that the launch after next uses the same ones again.
constexpr DeviceCacheOptions kSizes = {
    .lane_bytes = size_t{1} << 20, .staging_bytes = size_t{8} << 20, .launches_max = 2};

class DeviceFailureTest : public testing::TestWithParam<uint32_t> {
 protected:
  DeviceFailureTest() {
    options_.history_format = kernels::PageFormat::kBf16;
    options_.rotations = RotationSet::Hadamard(options_.head_dim).value();
    reader_ = Open(to_mirror_);
    writer_ = Open(from_mirror_);
    keyspace_ = writer_->Keyspace(seconds(1));
    keys_ = writer_->Keys(keyspace_, tokens_, {}).value();
  }

  std::unique_ptr<Transfer> Open(const DeviceMirror& mirror) {
    auto transfer = Transfer::Open(options_, &client_).value();
    const absl::Status used = transfer->UseDeviceCache(mirror.View(), device_, kSizes);
    EXPECT_TRUE(used.ok()) << used;
    return transfer;
  }
  absl::Status Store() {
    auto store = writer_->StartStore({.keyspace = keyspace_,
                                      .keys = keys_,
                                      .parent = {},
                                      .first_page = 0,
                                      .blocks = from_.table(),
                                      .over_int2_prefix = false});
    if (!store.ok()) return store.status();
    const absl::Status stored = (*store)->StoreLayers(0, options_.layers, from_mirror_.stream());
    if (!stored.ok()) {
      EXPECT_TRUE(absl::IsFailedPrecondition((*store)->Finish()));
      return stored;
    }
    return (*store)->Finish();
  }
  std::unique_ptr<PageLoad> StartLoad() {
    const auto prefix = reader_->Acquire(keyspace_, keys_, seconds(1)).value();
    EXPECT_EQ(prefix.pages, kEnginePages);
    return reader_->StartLoad(prefix.token, keys_, 0, kEnginePages, to_.table(), seconds(1))
        .value();
  }
  void ExpectSameRows() {
    to_mirror_.Download();
    for (int layer = 0; layer < options_.layers; ++layer) {
      for (int token = 0; token < kEngineTokens; ++token) {
        for (const bool value : {false, true}) {
          ASSERT_EQ(to_.At(layer, value, 1, token, 3).bits,
                    from_.At(layer, value, 1, token, 3).bits)
              << "layer " << layer << ", token " << token;
        }
      }
    }
  }

  const std::shared_ptr<SimulatedDevice> device_ = std::make_shared<SimulatedDevice>(GetParam());
  WorkerOptions options_ = SmallWorkerOptions();
  MemoryClient client_;
  EngineCache from_{options_, {Layout::kInterleaved, 16}, 1};
  EngineCache to_{options_, {Layout::kHeadMajor, 48}, 2};
  DeviceMirror from_mirror_{*device_, from_}, to_mirror_{*device_, to_};
  const std::vector<int32_t> tokens_ = RandomTokens(kEngineTokens + 17, 5);
  std::unique_ptr<Transfer> reader_, writer_;
  std::string keyspace_;
  std::vector<PageKey> keys_;
};

TEST_P(DeviceFailureTest, AStoreWhoseCopyFailsIsNotPublishedAndLaterOnesAreRight) {
  for (const size_t copied : {0, 1, 3}) {
    device_->copies_to_host_max = copied;
    EXPECT_TRUE(absl::IsInternal(Store()));
    EXPECT_TRUE(absl::IsInternal(Store()));
  }
  device_->copies_to_host_max = SIZE_MAX;
  ASSERT_TRUE(writer_->WaitPublished(seconds(30)).ok());
  EXPECT_EQ(client_.pages(), 0u);
  for (int i = 0; i < 3; ++i) {
    const absl::Status stored = Store();
    ASSERT_TRUE(stored.ok()) << stored;
  }
  ASSERT_TRUE(writer_->WaitPublished(seconds(30)).ok());
  const auto load = StartLoad();
  ASSERT_TRUE(load->LoadLayers(0, options_.layers, to_mirror_.stream()).ok());
  ASSERT_TRUE(load->Wait().ok());
  ExpectSameRows();
}

TEST_P(DeviceFailureTest, LoadsBehindOneWhoseCopyFailsAreRight) {
  ASSERT_TRUE(Store().ok());
  ASSERT_TRUE(writer_->WaitPublished(seconds(30)).ok());
  for (const size_t fails_from : {1, 2}) {  // the tables' copy, or only those of pages
    device_->copies_fail_from = fails_from;
    for (int i = 0; i < 3; ++i) {
      const auto failed = StartLoad();
      EXPECT_TRUE(absl::IsInternal(failed->LoadLayers(0, options_.layers, to_mirror_.stream())));
    }
    device_->copies_fail_from = SIZE_MAX;
    std::vector<std::unique_ptr<PageLoad>> loads;
    for (int i = 0; i < 3; ++i) {
      loads.push_back(StartLoad());
      ASSERT_TRUE(loads.back()->LoadLayers(0, options_.layers, to_mirror_.stream()).ok());
    }
    loads.clear();
    ExpectSameRows();
    EXPECT_EQ(client_.leases(), 0u);
  }
}

// The first launch of a kernel loads its code, which no request should wait for.
TEST(DeviceStartTest, KernelsOfBothFormatsAreLaunchedBeforeTheFirstRequest) {
  auto device = std::make_shared<SimulatedDevice>(1);
  const auto& kernels = static_cast<const SimulatedKernels&>(device->kernels());
  MemoryClient client;
  WorkerOptions options = SmallWorkerOptions();
  options.rotations = RotationSet::Hadamard(options.head_dim).value();
  EngineCache cache(options, {Layout::kInterleaved, 16}, 1);
  DeviceMirror mirror(*device, cache);
  const auto transfer = Transfer::Open(options, &client).value();
  ASSERT_TRUE(transfer->UseDeviceCache(mirror.View(), device, kSizes).ok());
  EXPECT_EQ(kernels.quantize_from_launches.load(), 2);
  EXPECT_EQ(kernels.dequantize_launches.load(), 2);
}

INSTANTIATE_TEST_SUITE_P(Orders, DeviceFailureTest, testing::Range(1u, 9u));

}  // namespace
}  // namespace crumb::client
