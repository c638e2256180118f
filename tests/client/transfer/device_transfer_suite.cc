// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Transfers of a cache in device memory, against the same transfers of a cache in host memory. Each
// program that contains the suite defines its device in Platform().
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/fragment_header.h"
#include "crumb/transfer.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/gpu/pools/pool_player.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"
#include "tests/client/transfer/device_mirror.h"
#include "tests/client/transfer/engine_cache.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::PageFormat;
using std::chrono::seconds;

// Lanes of one BF16 page, tables of two launches, and staging memory for a few stores of all pages.
constexpr DeviceCacheOptions kSmall = {
    .lane_bytes = 1, .staging_bytes = size_t{4} << 20, .launches_max = 2};

// Rotations and means that differ between layers, heads and position blocks.
RotationSet Calibrated(const WorkerOptions& options) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal;
  const int dim = options.head_dim;
  RotationSet::Arrays arrays;
  arrays.layers = options.layers;
  arrays.kv_heads = options.kv_heads;
  arrays.head_dim = dim;
  arrays.position_blocks = 3;
  arrays.pages_per_position_block = 2;
  const int matrices = options.layers * options.kv_heads;
  // A permutation with signs is orthogonal.
  for (std::vector<float>* rotation : {&arrays.rotation_k, &arrays.rotation_v}) {
    rotation->assign(static_cast<size_t>(matrices) * dim * dim, 0.0f);
    for (int matrix = 0; matrix < matrices; ++matrix) {
      for (int i = 0; i < dim; ++i) {
        (*rotation)[(static_cast<size_t>(matrix) * dim + i) * dim + (i * 5 + matrix) % dim] =
            random() % 2 == 0 ? 1.0f : -1.0f;
      }
    }
  }
  for (int i = 0; i < matrices * 3 * dim; ++i) arrays.mean_k.push_back(normal(random));
  for (int i = 0; i < matrices * dim; ++i) arrays.mean_v.push_back(normal(random));
  return RotationSet::Of("calibrated", std::move(arrays)).value();
}

class DeviceTransferTest : public testing::TestWithParam<CacheShape> {
 protected:
  void SetUp() override {
    device_ = Platform().open(0);
    if (device_ == nullptr) GTEST_SKIP() << "needs a CUDA device";
  }

  static WorkerOptions Options(PageFormat format) {
    WorkerOptions options = Platform().options;
    options.history_format = format;
    options.rotations = RotationSet::Hadamard(options.head_dim).value();
    return options;
  }

  std::unique_ptr<Transfer> OnHost(const WorkerOptions& options, MemoryClient& client,
                                   EngineCache& cache) {
    auto transfer = Transfer::Open(options, &client).value();
    EXPECT_TRUE(transfer->UseCache(cache.View()).ok());
    return transfer;
  }
  std::unique_ptr<Transfer> OnDevice(const WorkerOptions& options, MemoryClient& client,
                                     const DeviceMirror& mirror) {
    auto transfer = Transfer::Open(options, &client).value();
    const absl::Status used = transfer->UseDeviceCache(mirror.View(), device_, kSmall);
    EXPECT_TRUE(used.ok()) << used;
    return transfer;
  }

  absl::StatusOr<std::unique_ptr<PageStore>> StartStore(Transfer& transfer,
                                                        const EngineCache& cache) {
    const std::string keyspace = transfer.Keyspace(seconds(1));
    const auto keys = transfer.Keys(keyspace, tokens_, {}).value();
    return transfer.StartStore({.keyspace = keyspace,
                                .keys = keys,
                                .parent = {},
                                .first_page = 0,
                                .blocks = cache.table(),
                                .over_int2_prefix = false});
  }
  // Stores all pages, layers in the given portions.
  void Store(Transfer& transfer, const EngineCache& cache, DeviceStream stream, int portion) {
    auto store = StartStore(transfer, cache);
    ASSERT_TRUE(store.ok()) << store.status();
    const int layers = Platform().options.layers;
    for (int layer = 0; layer < layers; layer += portion) {
      const absl::Status stored = (*store)->StoreLayers(layer, layer + portion, stream);
      ASSERT_TRUE(stored.ok()) << stored;
    }
    ASSERT_TRUE((*store)->Finish().ok());
  }
  static void Published(Transfer& transfer) {
    const absl::Status published = transfer.WaitPublished(seconds(60));
    ASSERT_TRUE(published.ok()) << published;
  }
  std::unique_ptr<PageLoad> StartLoad(Transfer& transfer, const EngineCache& cache, int first) {
    const std::string keyspace = transfer.Keyspace(seconds(1));
    const auto keys = transfer.Keys(keyspace, tokens_, {}).value();
    const auto prefix = transfer.Acquire(keyspace, keys, seconds(1));
    EXPECT_TRUE(prefix.ok() && prefix->pages == kEnginePages);
    return transfer.StartLoad(prefix->token, keys, first, kEnginePages, cache.table(), seconds(1))
        .value();
  }

  // Compares the pages that two stores of the same rows published: keys and headers are the same,
  // and tiles differ in at most a few bytes that the platform rounds differently.
  static void ExpectSamePages(const MemoryClient& got, const MemoryClient& expected) {
    const auto ours = got.contents(), theirs = expected.contents();
    ASSERT_EQ(ours.size(), static_cast<size_t>(kEnginePages));
    ASSERT_EQ(theirs.size(), ours.size());
    size_t bytes = 0, differ = 0;
    for (const auto& [key, page] : ours) {
      const auto found = theirs.find(key);
      ASSERT_NE(found, theirs.end());
      ASSERT_EQ(found->second.size(), page.size());
      const auto header = DecodeFragmentHeader(std::as_bytes(std::span(page)));
      ASSERT_TRUE(header.ok()) << header.status();
      const bool exact = header->format == crumb::PageFormat::kBf16;
      for (size_t i = FragmentHeaderBytes(header->range.tiles()); i < page.size(); ++i) {
        const bool different = page[i] != found->second[i];
        EXPECT_FALSE(exact && different) << "a BF16 page's byte " << i;
        differ += different;
        ++bytes;
      }
    }
    EXPECT_LE(static_cast<double>(differ), Platform().error_max * static_cast<double>(bytes));
  }

  // Compares two whole caches: rows of loaded pages approximately, everything else bit by bit.
  static void ExpectSameRows(EngineCache& got, EngineCache& expected, const WorkerOptions& options,
                             int first_page, int layers) {
    double error = 0.0, norm = 0.0;
    for (int layer = 0; layer < layers; ++layer) {
      for (int head = 0; head < options.kv_heads; ++head) {
        for (int token = first_page * kPageTokens; token < kEngineTokens; ++token) {
          for (const bool value : {false, true}) {
            for (int i = 0; i < options.head_dim; ++i) {
              Bf16& ours = got.At(layer, value, head, token, i);
              const Bf16 theirs = expected.At(layer, value, head, token, i);
              const double difference = kernels::Bf16ToFloat(ours) - kernels::Bf16ToFloat(theirs);
              error += difference * difference;
              norm += std::pow(kernels::Bf16ToFloat(theirs), 2);
              if (token >= kPageTokens && options.history_format == PageFormat::kInt2) {
                ours = theirs;
              }
            }
          }
        }
      }
    }
    // Two roundings to BF16 differ by 1.7e-3 if every value is rounded the other way.
    EXPECT_LE(std::sqrt(error / norm), 2.6e-3);
    for (size_t layer = 0; layer < got.memory().size(); ++layer) {
      EXPECT_EQ(std::memcmp(got.memory()[layer].data(), expected.memory()[layer].data(),
                            got.memory()[layer].size() * sizeof(Bf16)),
                0)
          << "layer " << layer << ": rows of BF16 pages, or memory outside the pages";
    }
  }

  void CompareStores(const WorkerOptions& options, int portion,
                     RowElement element = RowElement::kBf16) {
    MemoryClient host_client, device_client;
    EngineCache cache(options, GetParam(), 1, element);
    const auto host = OnHost(options, host_client, cache);
    Store(*host, cache, nullptr, options.layers);
    Published(*host);
    DeviceMirror mirror(*device_, cache);
    const auto on_device = OnDevice(options, device_client, mirror);
    Store(*on_device, cache, mirror.stream(), portion);
    Published(*on_device);
    ExpectSamePages(device_client, host_client);
  }

  void CompareLoads(const WorkerOptions& options, int first_page, int layers) {
    MemoryClient client;
    EngineCache from(options, {Layout::kHeadMajor, 64}, 3);
    const auto writer = OnHost(options, client, from);
    Store(*writer, from, nullptr, options.layers);
    Published(*writer);
    EngineCache expected(options, GetParam(), 4), got(options, GetParam(), 4);
    const auto host = OnHost(options, client, expected);
    ASSERT_TRUE(StartLoad(*host, expected, first_page)->LoadLayers(0, layers).ok());
    DeviceMirror mirror(*device_, got);
    const auto on_device = OnDevice(options, client, mirror);
    const auto load = StartLoad(*on_device, got, first_page);
    ASSERT_EQ(load->pages(), kEnginePages - first_page);
    EXPECT_TRUE(load->Done().value());
    const absl::Status loaded = load->LoadLayers(0, layers, mirror.stream());
    ASSERT_TRUE(loaded.ok()) << loaded;
    ASSERT_TRUE(load->Wait().ok());
    EXPECT_TRUE(load->Done().value());
    mirror.Download();
    ExpectSameRows(got, expected, options, first_page, layers);
  }

  // Loads the pages into FP8 caches on host and device, and returns the fraction of bytes that
  // differ.
  void CompareFp8Loads(const WorkerOptions& options, double* differ) {
    MemoryClient client;
    EngineCache from(options, {Layout::kHeadMajor, 64}, 3, RowElement::kFp8E4m3);
    const auto writer = OnHost(options, client, from);
    Store(*writer, from, nullptr, options.layers);
    Published(*writer);
    EngineCache expected(options, GetParam(), 4, RowElement::kFp8E4m3);
    EngineCache got(options, GetParam(), 4, RowElement::kFp8E4m3);
    const auto host = OnHost(options, client, expected);
    ASSERT_TRUE(StartLoad(*host, expected, 0)->LoadLayers(0, options.layers).ok());
    DeviceMirror mirror(*device_, got);
    const auto on_device = OnDevice(options, client, mirror);
    const auto load = StartLoad(*on_device, got, 0);
    const absl::Status loaded = load->LoadLayers(0, options.layers, mirror.stream());
    ASSERT_TRUE(loaded.ok()) << loaded;
    ASSERT_TRUE(load->Wait().ok());
    mirror.Download();
    size_t bytes = 0, wrong = 0;
    for (int layer = 0; layer < options.layers; ++layer) {
      const auto ours = std::as_bytes(std::span(got.memory()[layer]));
      const auto theirs = std::as_bytes(std::span(expected.memory()[layer]));
      for (size_t i = 0; i < ours.size(); ++i) wrong += ours[i] != theirs[i];
      bytes += ours.size();
    }
    *differ = static_cast<double>(wrong) / static_cast<double>(bytes);
  }

  std::shared_ptr<Device> device_;
  const std::vector<int32_t> tokens_ = RandomTokens(kEngineTokens + 17, 5);
};

TEST_P(DeviceTransferTest, StoredINT2PagesAreThoseOfTheHost) {
  CompareStores(Options(PageFormat::kInt2), /*portion=*/2);
}

TEST_P(DeviceTransferTest, StoredBF16PagesAreThoseOfTheHost) {
  CompareStores(Options(PageFormat::kBf16), /*portion=*/2);
}

TEST_P(DeviceTransferTest, StoredFP8RowsGiveThePagesOfTheHost) {
  CompareStores(Options(PageFormat::kBf16), /*portion=*/2, RowElement::kFp8E4m3);
  CompareStores(Options(PageFormat::kInt2), /*portion=*/2, RowElement::kFp8E4m3);
}

TEST_P(DeviceTransferTest, LoadedFP8RowsAreThoseOfTheHost) {
  double differ = 1.0;
  CompareFp8Loads(Options(PageFormat::kBf16), &differ);
  EXPECT_EQ(differ, 0.0);
  // Values that the platform rounds differently are next to each other.
  CompareFp8Loads(Options(PageFormat::kInt2), &differ);
  EXPECT_LE(differ, 0.01);
}

TEST_P(DeviceTransferTest, LoadedINT2PagesAreThoseOfTheHost) {
  CompareLoads(Options(PageFormat::kInt2), 0, Platform().options.layers);
}

TEST_P(DeviceTransferTest, LoadedBF16PagesAreThoseOfTheHost) {
  CompareLoads(Options(PageFormat::kBf16), 0, Platform().options.layers);
}

TEST_P(DeviceTransferTest, OnlyTheRequestedPagesAndLayersAreWritten) {
  CompareLoads(Options(PageFormat::kInt2), 3, 1);
}

INSTANTIATE_TEST_SUITE_P(Layouts, DeviceTransferTest,
                         testing::Values(CacheShape{Layout::kTokenMajor, 16},
                                         CacheShape{Layout::kTokenMajor, 128},
                                         CacheShape{Layout::kHeadMajor, 48},
                                         CacheShape{Layout::kInterleaved, 64},
                                         CacheShape{Layout::kInterleaved, 16}));

class DeviceTransferOrderTest : public DeviceTransferTest {};

INSTANTIATE_TEST_SUITE_P(Layouts, DeviceTransferOrderTest,
                         testing::Values(CacheShape{Layout::kInterleaved, 16}));

TEST_P(DeviceTransferOrderTest, RotationsMeansAndPositionBlocksOfEachLayerAndHead) {
  WorkerOptions options = Options(PageFormat::kInt2);
  options.rotations = Calibrated(options);
  CompareStores(options, /*portion=*/2);
  CompareStores(options, /*portion=*/1);
  CompareLoads(options, 0, options.layers);
}

TEST_P(DeviceTransferOrderTest, RowsMayBeOverwrittenBehindAStoreOnItsStream) {
  const WorkerOptions options = Options(PageFormat::kInt2);
  MemoryClient host_client, device_client;
  EngineCache cache(options, GetParam(), 1);
  const auto host = OnHost(options, host_client, cache);
  Store(*host, cache, nullptr, options.layers);
  Published(*host);
  DeviceMirror mirror(*device_, cache);
  const auto on_device = OnDevice(options, device_client, mirror);
  Store(*on_device, cache, mirror.stream(), options.layers);
  mirror.Clear();
  Published(*on_device);
  ExpectSamePages(device_client, host_client);
}

TEST_P(DeviceTransferOrderTest, ManyStoresAndLoadsShareLanesAndStagingMemory) {
  const WorkerOptions options = Options(PageFormat::kBf16);
  MemoryClient client;
  EngineCache from(options, GetParam(), 1), to(options, GetParam(), 2);
  DeviceMirror source(*device_, from), target(*device_, to);
  const auto writer = OnDevice(options, client, source);
  // More stores than the staging memory has room for; it is free again when pages are published.
  for (int i = 0; i < 40; ++i) {
    Store(*writer, from, source.stream(), 1);
    if (i % 2 == 1) Published(*writer);
  }
  Published(*writer);
  const auto reader = OnDevice(options, client, target);
  std::vector<std::unique_ptr<PageLoad>> loads;
  // Behind a load of all pages, more launches than may be queued before a call blocks.
  for (int i = 0; i < 20; ++i) {
    loads.push_back(StartLoad(*reader, to, i == 0 ? 0 : kEnginePages - 1));
    ASSERT_TRUE(loads.back()->LoadLayers(0, options.layers, target.stream()).ok());
  }
  loads.clear();  // waits
  target.Download();
  for (int layer = 0; layer < options.layers; ++layer) {
    for (int token = 0; token < kEngineTokens; ++token) {
      ASSERT_EQ(to.At(layer, true, 1, token, 3).bits, from.At(layer, true, 1, token, 3).bits);
    }
  }
}

TEST_P(DeviceTransferOrderTest, StoresOfSeveralStreamsDoNotMix) {
  const WorkerOptions options = Options(PageFormat::kInt2);
  MemoryClient host_client, device_client;
  EngineCache cache(options, GetParam(), 1);
  const auto host = OnHost(options, host_client, cache);
  Store(*host, cache, nullptr, options.layers);
  Published(*host);
  DeviceMirror mirror(*device_, cache), other(*device_, cache);
  const auto on_device = OnDevice(options, device_client, mirror);
  const std::string keyspace = on_device->Keyspace(seconds(1));
  const auto keys = on_device->Keys(keyspace, tokens_, {}).value();
  for (int page = 0; page < kEnginePages; ++page) {
    auto store = on_device
                     ->StartStore({.keyspace = keyspace,
                                   .keys = std::span(keys).subspan(page, 1),
                                   .parent = page == 0 ? PageKey() : keys[page - 1],
                                   .first_page = page,
                                   .blocks = cache.table(),
                                   .over_int2_prefix = false})
                     .value();
    for (int layer = 0; layer < options.layers; ++layer) {
      const DeviceMirror& one = layer % 2 == 0 ? mirror : other;
      ASSERT_TRUE(store->StoreLayers(layer, layer + 1, one.stream()).ok());
    }
    ASSERT_TRUE(store->Finish().ok());
  }
  Published(*on_device);
  ExpectSamePages(device_client, host_client);
}

TEST_P(DeviceTransferOrderTest, StagingMemoryIsABound) {
  const WorkerOptions options = Options(PageFormat::kBf16);
  MemoryClient client;
  EngineCache cache(options, GetParam(), 1);
  DeviceMirror mirror(*device_, cache);
  const auto transfer = OnDevice(options, client, mirror);
  std::vector<std::unique_ptr<PageStore>> open;
  absl::Status status;
  while (status.ok()) {
    ASSERT_LT(open.size(), 1000u);
    auto store = StartStore(*transfer, cache);
    status = store.status();
    if (store.ok()) open.push_back(*std::move(store));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  open.clear();
  Store(*transfer, cache, mirror.stream(), options.layers);
  Published(*transfer);
  EXPECT_EQ(client.pages(), static_cast<size_t>(kEnginePages));
}

TEST_P(DeviceTransferOrderTest, ARowThatIsNotFiniteKeepsItsPageBack) {
  for (const PageFormat format : {PageFormat::kInt2, PageFormat::kBf16}) {
    const WorkerOptions options = Options(format);
    MemoryClient client;
    EngineCache cache(options, GetParam(), 3);
    cache.At(1, true, 0, 2 * kPageTokens + 5, 7) =
        kernels::Bf16FromFloat(std::numeric_limits<float>::quiet_NaN());
    DeviceMirror mirror(*device_, cache);
    const auto transfer = OnDevice(options, client, mirror);
    Store(*transfer, cache, mirror.stream(), 1);
    Published(*transfer);
    EXPECT_EQ(client.pages(), static_cast<size_t>(kEnginePages - 1));
    EXPECT_EQ(transfer->counters().windows_refused, 1);
  }
}

TEST_P(DeviceTransferOrderTest, PagesOfAStoreThatIsNotFinishedAreNotPublished) {
  const WorkerOptions options = Options(PageFormat::kInt2);
  MemoryClient client;
  EngineCache cache(options, GetParam(), 3);
  DeviceMirror mirror(*device_, cache);
  const auto transfer = OnDevice(options, client, mirror);
  auto store = StartStore(*transfer, cache).value();
  EXPECT_TRUE(absl::IsOutOfRange(store->StoreLayers(0, options.layers + 1, mirror.stream())));
  ASSERT_TRUE(store->StoreLayers(0, options.layers - 1, mirror.stream()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Finish()));
  store.reset();
  Published(*transfer);
  EXPECT_EQ(client.pages(), 0u);
}

TEST_P(DeviceTransferOrderTest, LayoutsThatKernelsCannotReadAreRefused) {
  const WorkerOptions options = Options(PageFormat::kInt2);
  MemoryClient client;
  const auto refused = [&](const PagedCache& cache) {
    auto transfer = Transfer::Open(options, &client).value();
    return absl::IsInvalidArgument(transfer->UseDeviceCache(cache, device_, kSmall));
  };
  EngineCache cache(options, GetParam(), 3), transposed(options, {Layout::kTransposedKeys, 32}, 3);
  DeviceMirror mirror(*device_, cache), of_transposed(*device_, transposed);
  EXPECT_FALSE(refused(mirror.View()));
  EXPECT_TRUE(refused(of_transposed.View()));
  PagedCache changed = mirror.View();
  changed.block_tokens = 129;
  EXPECT_TRUE(refused(changed));
  changed = mirror.View();
  changed.layers[1].v.base = static_cast<Bf16*>(changed.layers[1].v.base) + 1;
  EXPECT_TRUE(refused(changed));
  changed = mirror.View();
  changed.layers[1].v.token_stride *= 2;
  EXPECT_TRUE(refused(changed));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Transfer::Open(options, &client).value()->UseDeviceCache(mirror.View(), nullptr, kSmall)));
}

}  // namespace
}  // namespace crumb::client
