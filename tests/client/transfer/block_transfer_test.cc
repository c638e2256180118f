// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Pages between crumbd and engines that attend INT2 blocks of their own pools.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/fragment_header.h"
#include "crumb/transfer.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/block_engine.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using std::chrono::seconds;

constexpr int kPages = 9;
constexpr int kTokens = kPages * kPageTokens;

// An engine with a pool, and a copy of the pool that a Transfer reads and writes.
class PoolEngine {
 public:
  PoolEngine(const WorkerOptions& options, Client& client)
      : engine(options, 200),
        pool(engine.pool()),
        transfer(Transfer::Open(options, &client).value()) {
    EXPECT_TRUE(transfer->UseBlocks({.layers = engine.LayersAt(pool.data())}).ok());
  }

  // Copies the engine's pool to where the Transfer expects it.
  void CopyPool() { std::ranges::copy(engine.pool(), pool.begin()); }

  // The block table of a request as a Transfer has it.
  static std::vector<int64_t> TableOf(const EngineRequest& request) {
    std::vector<int64_t> table(request.sink.begin(), request.sink.end());
    table.insert(table.end(), request.history.begin(), request.history.end());
    return table;
  }
  absl::Status Store(const EngineRequest& request, int layers) {
    const std::string keyspace = transfer->Keyspace(seconds(1));
    const auto keys = transfer->Keys(keyspace, request.model->prompt(kTokens), {}).value();
    const std::vector<int64_t> table = TableOf(request);
    auto store = transfer->StartStore({.keyspace = keyspace,
                                       .keys = keys,
                                       .parent = {},
                                       .first_page = 0,
                                       .blocks = table,
                                       .over_int2_prefix = false});
    if (!store.ok()) return store.status();
    EXPECT_TRUE((*store)->StoreLayers(0, layers).ok());
    EXPECT_TRUE((*store)->Finish().ok());
    return transfer->WaitPublished(seconds(30));
  }

  // Loads pages [first, kPages) to the request's blocks.
  absl::Status Load(const EngineRequest& request, int first, int layers) {
    const std::string keyspace = transfer->Keyspace(seconds(1));
    const auto keys = transfer->Keys(keyspace, request.model->prompt(kTokens), {}).value();
    const TransferPrefix prefix = transfer->Acquire(keyspace, keys, seconds(1)).value();
    EXPECT_EQ(prefix.pages, kPages);
    const std::vector<int64_t> table = TableOf(request);
    auto load = transfer->StartLoad(prefix.token, keys, first, kPages, table, seconds(1));
    if (!load.ok()) return load.status();
    EXPECT_EQ((*load)->pages(), kPages - first);
    return (*load)->LoadLayers(0, layers);
  }

  Engine engine;
  std::vector<std::byte> pool;
  std::unique_ptr<Transfer> transfer;
};

class BlockTransferTest : public testing::Test {
 protected:
  BlockTransferTest() { options_.rotations = RotationSet::Hadamard(options_.head_dim).value(); }

  // Computes the model's first 600 tokens, and stores their pages.
  EngineRequest Computed(PoolEngine& from) {
    EngineRequest request = from.engine.NewRequest(model_);
    EXPECT_TRUE(from.engine.Step({&request}, {600}).ok());
    from.CopyPool();
    return request;
  }
  // A request whose first pages are to be loaded.
  EngineRequest Waiting(PoolEngine& to) {
    EngineRequest request = to.engine.NewRequest(model_);
    to.engine.Reserve(request, kTokens);
    request.length = request.hit = kTokens;
    to.CopyPool();
    return request;
  }
  std::span<const std::byte> Block(const PoolEngine& engine, int32_t id) const {
    const size_t bytes = engine.engine.block(0).size();
    return std::span(engine.pool).subspan(bytes * id, bytes);
  }

  WorkerOptions options_ = SmallWorkerOptions();
  MemoryClient client_;
  const SequenceModel model_{options_, RandomTokens(900, 31)};
};

TEST_F(BlockTransferTest, AnotherEngineGoesOnWhereTheFirstStopped) {
  PoolEngine from(options_, client_);
  const EngineRequest first = Computed(from);
  ASSERT_TRUE(from.Store(first, options_.layers).ok());
  ASSERT_EQ(client_.pages(), kPages);

  PoolEngine to(options_, client_);
  EngineRequest second = Waiting(to);
  const std::vector<std::byte> before = to.pool;
  ASSERT_TRUE(to.Load(second, 0, options_.layers).ok());
  for (int page = 1; page < kPages; ++page) {
    EXPECT_TRUE(
        std::ranges::equal(Block(from, first.history[page]), Block(to, second.history[page])))
        << "page " << page;
  }
  // Blocks of others, and the unused history block of the first page, are as they were.
  std::vector<int32_t> written(second.sink);
  written.insert(written.end(), second.history.begin() + 1, second.history.end());
  const size_t bytes = to.engine.block(0).size();
  for (int32_t id = 0; id < 200; ++id) {
    if (std::find(written.begin(), written.end(), id) != written.end()) continue;
    EXPECT_TRUE(std::ranges::equal(Block(to, id), std::span(before).subspan(bytes * id, bytes)))
        << "block " << id;
  }

  to.engine.set_pool(to.pool);
  const auto out = to.engine.Step({&second}, {70});
  ASSERT_TRUE(out.ok()) << out.status();
  const size_t row = static_cast<size_t>(options_.q_heads) * options_.head_dim;
  for (const int token : {0, 1, 63, 69}) {
    for (int layer = 0; layer < options_.layers; ++layer) {
      const std::vector<double> expected = model_.Expected(layer, kTokens + token, kTokens);
      double error = 0.0, norm = 0.0;
      for (size_t i = 0; i < row; ++i) {
        const double x = kernels::Bf16ToFloat((*out)[layer][token * row + i]);
        error += (x - expected[i]) * (x - expected[i]);
        norm += expected[i] * expected[i];
      }
      EXPECT_LT(std::sqrt(error / norm), BlockErrorMax())
          << "layer " << layer << " token " << token;
    }
  }
}

TEST_F(BlockTransferTest, PagesBehindALocalHitAreLoadedAlone) {
  PoolEngine from(options_, client_);
  ASSERT_TRUE(from.Store(Computed(from), options_.layers).ok());
  PoolEngine to(options_, client_);
  const EngineRequest request = Waiting(to);
  const std::vector<std::byte> before = to.pool;
  ASSERT_TRUE(to.Load(request, 4, options_.layers).ok());
  const size_t bytes = to.engine.block(0).size();
  for (int page = 0; page < kPages; ++page) {
    const int32_t id = request.history[page];
    EXPECT_EQ(std::ranges::equal(Block(to, id), std::span(before).subspan(bytes * id, bytes)),
              page < 4)
        << "page " << page;
  }
  for (const int32_t id : request.sink) {
    EXPECT_TRUE(std::ranges::equal(Block(to, id), std::span(before).subspan(bytes * id, bytes)));
  }
}

TEST_F(BlockTransferTest, PagesComputedOverInt2AreMarked) {
  PoolEngine from(options_, client_);
  ASSERT_TRUE(from.Store(Computed(from), options_.layers).ok());
  const std::string keyspace = from.transfer->Keyspace(seconds(1));
  const auto keys = from.transfer->Keys(keyspace, model_.prompt(kTokens), {}).value();
  const std::map<PageKey, std::string> contents = client_.contents();
  for (int page = 0; page < kPages; ++page) {
    const std::string& bytes = contents.at(keys[page]);
    const auto header =
        DecodeFragmentHeader({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
    ASSERT_TRUE(header.ok()) << header.status();
    // The token at position 383 is the first that attends INT2, in page 5.
    EXPECT_EQ(header->over_int2_prefix, page >= 5) << "page " << page;
  }
}

// The cache of an engine with BF16 rows: block i has page i of one sequence, [layers][pages, heads,
// tokens, K and V].
struct RowCache {
  explicit RowCache(const WorkerOptions& options)
      : dim(options.head_dim),
        heads(options.kv_heads),
        rows(options.layers,
             std::vector<Bf16>(static_cast<size_t>(kPages) * heads * head_elements())) {}

  int64_t head_elements() const { return int64_t{2} * kPageTokens * dim; }
  // Returns the K row of a token, behind which V lies.
  Bf16* Row(int layer, int head, int token) {
    return rows[layer].data() + (token / kPageTokens * heads + head) * head_elements() +
           token % kPageTokens * 2 * dim;
  }
  PagedCache View() {
    PagedCache cache{.layers = {}, .blocks = kPages, .block_tokens = kPageTokens};
    for (std::vector<Bf16>& layer : rows) {
      PagedRows k{.base = layer.data(),
                  .block_stride = heads * head_elements(),
                  .head_stride = head_elements(),
                  .token_stride = int64_t{2} * dim};
      PagedRows v = k;
      v.base = layer.data() + dim;
      cache.layers.push_back({.k = k, .v = v});
    }
    return cache;
  }
  // Fills it with the first tokens of a model.
  void Fill(const SequenceModel& model) {
    for (int layer = 0; layer < static_cast<int>(rows.size()); ++layer) {
      const std::vector<Bf16> k = model.Keys(layer, 0, kTokens);
      const std::vector<Bf16> v = model.Values(layer, 0, kTokens);
      for (int token = 0; token < kTokens; ++token) {
        for (int head = 0; head < heads; ++head) {
          const size_t from = static_cast<size_t>(token * heads + head) * dim;
          std::copy_n(&k[from], dim, Row(layer, head, token));
          std::copy_n(&v[from], dim, Row(layer, head, token) + dim);
        }
      }
    }
  }
  std::vector<int64_t> table() const { return {0, 1, 2, 3, 4, 5, 6, 7, 8}; }

  const int dim;
  const int heads;
  std::vector<std::vector<Bf16>> rows;
};

TEST_F(BlockTransferTest, AnEngineWithRowsReadsPagesOfBlocks) {
  PoolEngine from(options_, client_);
  ASSERT_TRUE(from.Store(Computed(from), options_.layers).ok());

  RowCache exact(options_), cache(options_);
  exact.Fill(model_);
  const auto reader = Transfer::Open(options_, &client_).value();
  ASSERT_TRUE(reader->UseCache(cache.View()).ok());
  const std::string keyspace = reader->Keyspace(seconds(1));
  const auto keys = reader->Keys(keyspace, model_.prompt(kTokens), {}).value();
  const TransferPrefix prefix = reader->Acquire(keyspace, keys, seconds(1)).value();
  ASSERT_EQ(prefix.pages, kPages);
  auto load = reader->StartLoad(prefix.token, keys, 0, kPages, cache.table(), seconds(1)).value();
  ASSERT_TRUE(load->LoadLayers(0, options_.layers).ok());

  for (int layer = 0; layer < options_.layers; ++layer) {
    for (int page = 0; page < kPages; ++page) {
      double error = 0.0, norm = 0.0;
      for (int i = 0; i < kPageTokens * options_.kv_heads * 2 * cache.dim; ++i) {
        const size_t at = static_cast<size_t>(page) * options_.kv_heads * cache.head_elements() + i;
        const double is = kernels::Bf16ToFloat(cache.rows[layer][at]);
        const double was = kernels::Bf16ToFloat(exact.rows[layer][at]);
        error += (is - was) * (is - was);
        norm += was * was;
      }
      // The sink is exact. Two bits a value leave less than half of a row's norm as error.
      EXPECT_LT(std::sqrt(error / norm), 0.5) << "page " << page;
      EXPECT_EQ(error == 0.0, page == 0) << "page " << page;
    }
  }
}

TEST_F(BlockTransferTest, ExactPagesAreQuantizedAndNotStored) {
  PoolEngine computed(options_, client_);
  const EngineRequest expected = Computed(computed);
  computed.transfer->Keyspace(seconds(1));  // opens it
  for (const KeyspaceId& keyspace : client_.int2_keyspaces()) {
    ASSERT_TRUE(client_.SetKeyspaceState(keyspace, KeyspaceState::kBf16, "test", "").ok());
  }
  RowCache cache(options_);
  cache.Fill(model_);
  const auto writer = Transfer::Open(options_, &client_).value();
  ASSERT_TRUE(writer->UseCache(cache.View()).ok());
  const std::string keyspace = writer->Keyspace(seconds(1));
  const auto keys = writer->Keys(keyspace, model_.prompt(kTokens), {}).value();
  auto store = writer
                   ->StartStore({.keyspace = keyspace,
                                 .keys = keys,
                                 .parent = {},
                                 .first_page = 0,
                                 .blocks = cache.table(),
                                 .over_int2_prefix = false})
                   .value();
  ASSERT_TRUE(store->StoreLayers(0, options_.layers).ok());
  ASSERT_TRUE(store->Finish().ok());
  ASSERT_TRUE(writer->WaitPublished(seconds(30)).ok());

  PoolEngine to(options_, client_);
  const EngineRequest request = Waiting(to);
  ASSERT_TRUE(to.Load(request, 0, options_.layers).ok());
  for (int page = 1; page < kPages; ++page) {
    EXPECT_TRUE(std::ranges::equal(Block(computed, expected.history[page]),
                                   Block(to, request.history[page])))
        << "page " << page;
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(to.Store(Computed(to), options_.layers)));
}

TEST_F(BlockTransferTest, ATileWithoutAScaleKeepsItsPageBack) {
  PoolEngine from(options_, client_);
  const EngineRequest request = Computed(from);
  const size_t meta = 2 * options_.tile_shape().code_bytes();
  const std::span<const std::byte> block = Block(from, request.history[4]);
  std::memset(from.pool.data() + (block.data() - from.pool.data()) + meta, 0, 4);
  ASSERT_TRUE(from.Store(request, options_.layers).ok());
  EXPECT_EQ(client_.pages(), kPages - 1);
  EXPECT_EQ(from.transfer->counters().windows_refused, 1u);
}

TEST_F(BlockTransferTest, WhatIsNoPoolOrNoTableIsRefused) {
  PoolEngine engine(options_, client_);
  const auto refused = [&](auto change) {
    std::vector<BlockPool> layers = engine.engine.LayersAt(engine.pool.data());
    change(layers);
    return absl::IsInvalidArgument(engine.transfer->UseBlocks({.layers = std::move(layers)}));
  };
  EXPECT_TRUE(refused([](auto& layers) { layers.pop_back(); }));
  EXPECT_TRUE(refused([](auto& layers) { layers[1].history = nullptr; }));
  EXPECT_TRUE(refused([](auto& layers) { layers[0].sink = nullptr; }));
  EXPECT_TRUE(refused([](auto& layers) { layers[0].block_stride = 100; }));
  EXPECT_TRUE(refused([](auto& layers) { layers[0].block_stride += 1; }));
  EXPECT_TRUE(refused([](auto& layers) { layers[1].blocks = 3; }));
  WorkerOptions exact = options_;
  exact.history_format = kernels::PageFormat::kBf16;
  const auto rows = Transfer::Open(exact, &client_).value();
  EXPECT_TRUE(absl::IsInvalidArgument(
      rows->UseBlocks({.layers = engine.engine.LayersAt(engine.pool.data())})));

  EngineRequest request = Computed(engine);
  EngineRequest wrong = request;
  wrong.history[3] = 200;
  EXPECT_TRUE(absl::IsInvalidArgument(engine.Store(wrong, options_.layers)));
  wrong = request;
  wrong.sink.back() = -1;
  EXPECT_TRUE(absl::IsInvalidArgument(engine.Store(wrong, options_.layers)));
  wrong = request;
  wrong.history.resize(kPages - 1);
  EXPECT_TRUE(absl::IsInvalidArgument(engine.Store(wrong, options_.layers)));
  EXPECT_EQ(client_.pages(), 0u);
}

}  // namespace
}  // namespace crumb::client
