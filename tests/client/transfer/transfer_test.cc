// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/transfer.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "kernels/fp8.h"
#include "kernels/quantize.h"
#include "tests/client/forwarding_client.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"
#include "tests/client/transfer/engine_cache.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using std::chrono::seconds;

class TransferTest : public testing::TestWithParam<CacheShape> {
 protected:
  static WorkerOptions Options(kernels::PageFormat format) {
    WorkerOptions options = SmallWorkerOptions();
    options.history_format = format;
    options.rotations = RotationSet::Hadamard(options.head_dim).value();
    return options;
  }

  std::unique_ptr<Transfer> Open(const WorkerOptions& options, EngineCache* cache) {
    auto transfer = Transfer::Open(options, &client_).value();
    if (cache != nullptr) {
      EXPECT_TRUE(transfer->UseCache(cache->View()).ok());
    }
    return transfer;
  }

  // Stores all pages of the cache.
  void Store(Transfer& transfer, const EngineCache& cache, int layers) {
    const std::string keyspace = transfer.Keyspace(seconds(1));
    const auto keys = transfer.Keys(keyspace, tokens_, {}).value();
    auto store = transfer.StartStore({.keyspace = keyspace,
                                      .keys = keys,
                                      .parent = {},
                                      .first_page = 0,
                                      .blocks = cache.table(),
                                      .over_int2_prefix = false});
    ASSERT_TRUE(store.ok()) << store.status();
    for (int layer = 0; layer < layers; ++layer) {
      ASSERT_TRUE((*store)->StoreLayers(layer, layer + 1).ok());
    }
    ASSERT_TRUE((*store)->Finish().ok());
    ASSERT_TRUE(transfer.WaitPublished(seconds(30)).ok());
  }

  // Loads pages [first, kEnginePages) under a lease of `scheduler`.
  void Load(Transfer& scheduler, Transfer& transfer, const EngineCache& cache, int first,
            int layers) {
    const std::string keyspace = scheduler.Keyspace(seconds(1));
    const auto keys = scheduler.Keys(keyspace, tokens_, {}).value();
    const auto prefix = scheduler.Acquire(keyspace, keys, seconds(1));
    ASSERT_TRUE(prefix.ok()) << prefix.status();
    ASSERT_EQ(prefix->pages, kEnginePages);
    auto load =
        transfer.StartLoad(prefix->token, keys, first, kEnginePages, cache.table(), seconds(1));
    ASSERT_TRUE(load.ok()) << load.status();
    ASSERT_EQ((*load)->pages(), kEnginePages - first);
    for (int layer = 0; layer < layers; ++layer) {
      ASSERT_TRUE((*load)->LoadLayers(layer, layer + 1).ok());
    }
  }

  // Returns the rows of one page as the quantizer computes them: [k and v, 64, head_dim].
  static std::vector<float> Expected(const WorkerOptions& options, EngineCache& cache, int page,
                                     int layer, int head) {
    const int dim = options.head_dim;
    std::vector<Bf16> rows(2 * kPageTokens * dim);
    for (int i = 0; i < 2 * kPageTokens * dim; ++i) {
      const int row = i / dim % kPageTokens;
      rows[i] = cache.At(layer, i >= kPageTokens * dim, head, page * kPageTokens + row, i % dim);
    }
    std::vector<float> out(rows.size());
    if (page == 0 || options.history_format == kernels::PageFormat::kBf16) {
      for (size_t i = 0; i < rows.size(); ++i) out[i] = kernels::Bf16ToFloat(rows[i]);
      return out;
    }
    const auto data = options.rotations.Expand(options.layers, options.kv_heads)[layer];
    kernels::QuantizeParams params;
    params.shape = options.tile_shape();
    params.method = options.method;
    params.k = rows.data();
    params.v = rows.data() + kPageTokens * dim;
    params.k_stride = params.v_stride = dim;
    params.k_transform = {.rotation = data->rotation_k() + head * dim * dim,
                          .clip = options.clip_k};
    params.v_transform = {.rotation = data->rotation_v() + head * dim * dim,
                          .clip = options.clip_v};
    std::vector<uint8_t> tile(params.shape.int2_bytes() + 127);
    params.tile = tile.data() + (128 - reinterpret_cast<uintptr_t>(tile.data()) % 128) % 128;
    kernels::QuantizeTile(params);
    kernels::DequantizeTileToModel(params.shape, params.tile, params.k_transform,
                                   params.v_transform, out.data(), out.data() + kPageTokens * dim);
    for (float& value : out) value = kernels::Bf16ToFloat(kernels::Bf16FromFloat(value));
    return out;
  }

  void ExpectLoaded(const WorkerOptions& options, EngineCache& from, EngineCache& to, int page) {
    for (int layer = 0; layer < options.layers; ++layer) {
      for (int head = 0; head < options.kv_heads; ++head) {
        const std::vector<float> expected = Expected(options, from, page, layer, head);
        const std::vector<float> loaded = Rows(options, to, page, layer, head);
        ASSERT_EQ(loaded, expected) << "page " << page << " layer " << layer << " head " << head;
      }
    }
  }

  static std::vector<float> Rows(const WorkerOptions& options, EngineCache& cache, int page,
                                 int layer, int head) {
    std::vector<float> out;
    for (const bool value : {false, true}) {
      for (int token = page * kPageTokens; token < (page + 1) * kPageTokens; ++token) {
        for (int i = 0; i < options.head_dim; ++i) {
          out.push_back(kernels::Bf16ToFloat(cache.At(layer, value, head, token, i)));
        }
      }
    }
    return out;
  }

  MemoryClient client_;
  const std::vector<int32_t> tokens_ = RandomTokens(kEngineTokens + 17, 5);
};

TEST_P(TransferTest, BF16PagesArriveBitByBitInAnotherCache) {
  const WorkerOptions options = Options(kernels::PageFormat::kBf16);
  EngineCache from(options, GetParam(), 1);
  EngineCache to(options, {Layout::kTokenMajor, 16}, 2);
  const auto writer = Open(options, &from), reader = Open(options, &to);
  Store(*writer, from, options.layers);
  Load(*writer, *reader, to, 0, options.layers);
  for (int page = 0; page < kEnginePages; ++page) ExpectLoaded(options, from, to, page);
}

TEST_P(TransferTest, INT2PagesArriveAsTheQuantizerMakesThem) {
  const WorkerOptions options = Options(kernels::PageFormat::kInt2);
  EngineCache from(options, {Layout::kHeadMajor, 64}, 3);
  EngineCache to(options, GetParam(), 4);
  const auto writer = Open(options, &from), reader = Open(options, &to);
  Store(*writer, from, options.layers);
  Load(*writer, *reader, to, 0, options.layers);
  for (int page = 0; page < kEnginePages; ++page) ExpectLoaded(options, from, to, page);
}

// Calls body(layer, value, head, token, element) for every element of the pages.
template <typename Body>
void ForEachElement(const WorkerOptions& options, const Body& body) {
  for (int layer = 0; layer < options.layers; ++layer) {
    for (const bool value : {false, true}) {
      for (int head = 0; head < options.kv_heads; ++head) {
        for (int token = 0; token < kEngineTokens; ++token) {
          for (int i = 0; i < options.head_dim; ++i) body(layer, value, head, token, i);
        }
      }
    }
  }
}

TEST_P(TransferTest, FP8RowsArriveInCachesOfBothTypes) {
  const WorkerOptions options = Options(kernels::PageFormat::kBf16);
  EngineCache from(options, GetParam(), 1, RowElement::kFp8E4m3);
  EngineCache same(options, {Layout::kTokenMajor, 16}, 2, RowElement::kFp8E4m3);
  EngineCache wide(options, {Layout::kHeadMajor, 64}, 3);
  const auto writer = Open(options, &from), reader = Open(options, &same);
  Store(*writer, from, options.layers);
  Load(*writer, *reader, same, 0, options.layers);
  Load(*writer, *Open(options, &wide), wide, 0, options.layers);
  int wrong = 0;
  ForEachElement(options, [&](int layer, bool value, int head, int token, int i) {
    const uint8_t code = from.CodeAt(layer, value, head, token, i);
    const float expected = kernels::Fp8ToFloat(code) * EngineCache::Scale(layer, value);
    wrong += same.CodeAt(layer, value, head, token, i) != code;
    wrong += wide.At(layer, value, head, token, i).bits != kernels::Bf16FromFloat(expected).bits;
  });
  EXPECT_EQ(wrong, 0);
}

TEST_P(TransferTest, INT2PagesBecomeFP8RowsByOneMoreRounding) {
  const WorkerOptions options = Options(kernels::PageFormat::kInt2);
  EngineCache from(options, {Layout::kHeadMajor, 64}, 3, RowElement::kFp8E4m3);
  EngineCache wide(options, {Layout::kTokenMajor, 16}, 4);
  EngineCache to(options, GetParam(), 5, RowElement::kFp8E4m3);
  const auto writer = Open(options, &from);
  Store(*writer, from, options.layers);
  Load(*writer, *Open(options, &wide), wide, 0, options.layers);
  Load(*writer, *Open(options, &to), to, 0, options.layers);
  int wrong = 0;
  ForEachElement(options, [&](int layer, bool value, int head, int token, int i) {
    const float exact = kernels::Bf16ToFloat(wide.At(layer, value, head, token, i));
    wrong += to.CodeAt(layer, value, head, token, i) !=
             kernels::Fp8FromFloat(exact / EngineCache::Scale(layer, value));
  });
  EXPECT_EQ(wrong, 0);
}

TEST_P(TransferTest, OnlyTheRequestedPagesAndLayersAreWritten) {
  const WorkerOptions options = Options(kernels::PageFormat::kInt2);
  EngineCache from(options, {Layout::kHeadMajor, 64}, 3);
  EngineCache to(options, GetParam(), 4);
  EngineCache untouched(options, GetParam(), 4);
  const auto writer = Open(options, &from), reader = Open(options, &to);
  Store(*writer, from, options.layers);
  Load(*writer, *reader, to, 3, /*layers=*/1);
  for (int page = 0; page < kEnginePages; ++page) {
    for (int layer = 0; layer < options.layers; ++layer) {
      const bool written = page >= 3 && layer == 0;
      EXPECT_EQ(Rows(options, to, page, layer, 0) != Rows(options, untouched, page, layer, 0),
                written)
          << "page " << page << " layer " << layer;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, TransferTest,
    testing::Values(CacheShape{Layout::kTokenMajor, 16}, CacheShape{Layout::kTokenMajor, 128},
                    CacheShape{Layout::kHeadMajor, 32}, CacheShape{Layout::kHeadMajor, 48},
                    CacheShape{Layout::kInterleaved, 64}, CacheShape{Layout::kInterleaved, 16},
                    CacheShape{Layout::kTransposedKeys, 128},
                    CacheShape{Layout::kTransposedKeys, 32}));

class TransferErrorsTest : public TransferTest {};

TEST_F(TransferErrorsTest, ARowThatIsNotFiniteKeepsItsPageBack) {
  const WorkerOptions options = Options(kernels::PageFormat::kInt2);
  EngineCache from(options, {Layout::kHeadMajor, 64}, 3);
  from.At(1, true, 0, 2 * kPageTokens + 5, 7) =
      kernels::Bf16FromFloat(std::numeric_limits<float>::quiet_NaN());
  const auto writer = Open(options, &from);
  Store(*writer, from, options.layers);
  EXPECT_EQ(client_.pages(), kEnginePages - 1);
  EXPECT_EQ(writer->counters().windows_refused, 1);
  const std::string keyspace = writer->Keyspace(seconds(1));
  const auto keys = writer->Keys(keyspace, tokens_, {}).value();
  EXPECT_EQ(writer->Acquire(keyspace, keys, seconds(1))->pages, 2);
}

TEST_F(TransferErrorsTest, ScalesOfFP8RowsAreCheckedAndTheirNaNKeepsAPageBack) {
  const WorkerOptions options = Options(kernels::PageFormat::kBf16);
  EngineCache cache(options, {Layout::kHeadMajor, 64}, 3, RowElement::kFp8E4m3);
  const auto transfer = Open(options, &cache);
  for (const float scale : {0.0f, -1.0f, std::numeric_limits<float>::infinity(), NAN}) {
    PagedCache changed = cache.View();
    changed.layers[1].v.scale = scale;
    EXPECT_TRUE(absl::IsInvalidArgument(transfer->UseCache(changed))) << scale;
  }
  cache.CodeAt(0, true, 0, 3 * kPageTokens + 5, 1) = 0x7f;
  Store(*transfer, cache, options.layers);
  EXPECT_EQ(client_.pages(), static_cast<size_t>(kEnginePages - 1));
}

TEST_F(TransferErrorsTest, PagesAreNotPublishedBeforeEveryLayerWasStored) {
  const WorkerOptions options = Options(kernels::PageFormat::kInt2);
  EngineCache from(options, {Layout::kHeadMajor, 64}, 3);
  const auto writer = Open(options, &from);
  const std::string keyspace = writer->Keyspace(seconds(1));
  const auto keys = writer->Keys(keyspace, tokens_, {}).value();
  auto store = writer
                   ->StartStore({.keyspace = keyspace,
                                 .keys = keys,
                                 .parent = {},
                                 .first_page = 0,
                                 .blocks = from.table(),
                                 .over_int2_prefix = false})
                   .value();
  EXPECT_TRUE(absl::IsOutOfRange(store->StoreLayers(0, options.layers + 1)));
  EXPECT_TRUE(absl::IsOutOfRange(store->StoreLayers(-1, 1)));
  ASSERT_TRUE(store->StoreLayers(0, options.layers - 1).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Finish()));
  store.reset();
  ASSERT_TRUE(writer->WaitPublished(seconds(10)).ok());
  EXPECT_EQ(client_.pages(), 0);
}

TEST_F(TransferErrorsTest, BlockTablesThatLeaveTheCacheAreRefused) {
  const WorkerOptions options = Options(kernels::PageFormat::kInt2);
  EngineCache from(options, {Layout::kHeadMajor, 64}, 3);
  const auto writer = Open(options, &from);
  const std::string keyspace = writer->Keyspace(seconds(1));
  const auto keys = writer->Keys(keyspace, tokens_, {}).value();
  std::vector<int64_t> blocks(from.table().begin(), from.table().end());
  const auto start = [&](int first_page) {
    return writer
        ->StartStore({.keyspace = keyspace,
                      .keys = keys,
                      .parent = {},
                      .first_page = first_page,
                      .blocks = blocks,
                      .over_int2_prefix = false})
        .status();
  };
  EXPECT_TRUE(start(0).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(start(1)));  // one page beyond the table
  EXPECT_TRUE(absl::IsInvalidArgument(start(-1)));
  EXPECT_TRUE(absl::IsInvalidArgument(start(std::numeric_limits<int>::max())));
  blocks[3] = kEnginePages + 5;  // the first block that the cache does not have
  EXPECT_TRUE(absl::IsInvalidArgument(start(0)));
  blocks[3] = -1;
  EXPECT_TRUE(absl::IsInvalidArgument(start(0)));
}

TEST_F(TransferErrorsTest, OtherOptionsOtherKeysAndOtherTokens) {
  WorkerOptions options = Options(kernels::PageFormat::kInt2);
  const auto writer = Open(options, nullptr);
  options.rope = "other";
  const auto other = Open(options, nullptr);
  const std::string keyspace = writer->Keyspace(seconds(1));
  EXPECT_TRUE(writer->Keys(keyspace, tokens_, {}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(other->Keys(keyspace, tokens_, {}).status()));
  EXPECT_FALSE(writer->Keys(keyspace.substr(1), tokens_, {}).ok());
  EXPECT_NE(writer->Keys(keyspace, tokens_, {}).value(),
            other->Keys(other->Keyspace(seconds(1)), tokens_, {}).value());
  Digest salt{};
  salt[0] = 1;
  EXPECT_NE(writer->Keys(keyspace, tokens_, {}).value(),
            writer->Keys(keyspace, tokens_, {&salt, 1}).value());
}

TEST_F(TransferErrorsTest, KeysContinueBehindAnyPage) {
  const auto transfer = Open(Options(kernels::PageFormat::kInt2), nullptr);
  const std::string keyspace = transfer->Keyspace(seconds(1));
  std::vector<Digest> extra(tokens_.size() / kPageTokens);
  extra.back()[0] = 1;
  const std::vector<PageKey> all = transfer->Keys(keyspace, tokens_, extra).value();
  ASSERT_GE(all.size(), 2u);
  for (size_t page = 0; page <= all.size(); ++page) {
    const std::vector<PageKey> rest =
        transfer
            ->NextKeys(keyspace, page == 0 ? PageKey{} : all[page - 1],
                       std::span<const int32_t>(tokens_).subspan(page * kPageTokens),
                       std::span<const Digest>(extra).subspan(page))
            .value();
    EXPECT_EQ(rest, std::vector<PageKey>(all.begin() + static_cast<ptrdiff_t>(page), all.end()));
  }
}

TEST_F(TransferErrorsTest, WithoutCrumbdPrefixesAreEmptyAndNothingFails) {
  const WorkerOptions options = Options(kernels::PageFormat::kInt2);
  client_.up = false;
  EngineCache from(options, {Layout::kHeadMajor, 64}, 3);
  const auto writer = Open(options, &from);
  Store(*writer, from, options.layers);
  const std::string keyspace = writer->Keyspace(seconds(1));
  const auto keys = writer->Keys(keyspace, tokens_, {}).value();
  const auto prefix = writer->Acquire(keyspace, keys, seconds(1));
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  EXPECT_EQ(prefix->pages, 0);
  EXPECT_EQ(writer->counters().publish_dropped_unavailable, kEnginePages);
}

// A client whose pages are all on a lower tier and never arrive.
class LateClient final : public ForwardingClient {
 public:
  using ForwardingClient::ForwardingClient;
  absl::StatusOr<AcquireResult> Acquire(const AcquireRequest&) override {
    AcquireResult late;
    late.miss_reason = MissReason::kDeadline;
    return late;
  }
};

TEST_F(TransferErrorsTest, OnlyALookupThatWaitedHasExceededItsDeadline) {
  LateClient late(client_);
  const auto transfer = Transfer::Open(Options(kernels::PageFormat::kInt2), &late).value();
  const std::string keyspace = transfer->Keyspace(seconds(1));
  const auto keys = transfer->Keys(keyspace, tokens_, {}).value();
  EXPECT_EQ(transfer->Acquire(keyspace, keys, seconds(0)).value().miss_reason,
            MissReason::kDeadline);
  EXPECT_EQ(transfer->counters().deadline_exceeded, 0);
  EXPECT_EQ(transfer->Acquire(keyspace, keys, seconds(1)).value().miss_reason,
            MissReason::kDeadline);
  EXPECT_EQ(transfer->counters().deadline_exceeded, 1);
}

}  // namespace
}  // namespace crumb::client
