// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-micro-bench times single steps on the path of a page with Google Benchmark: one thread,
// data in cache. `--benchmark_format=json` prints JSON, `--benchmark_filter=REGEX` selects steps.

#include <benchmark/benchmark.h>

#include <cstddef>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "common/crc32c.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "storage/policy/policy.h"
#include "storage/tiered_store.h"

namespace crumb::bench {
namespace {

constexpr size_t kTileBytes = 4608;

std::vector<std::byte> SomeBytes(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31);
  return bytes;
}

void TileSum(benchmark::State& state) {
  const auto tile = SomeBytes(kTileBytes);
  for (auto _ : state) benchmark::DoNotOptimize(Crc32c(tile));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(kTileBytes));
}
BENCHMARK(TileSum);

void TileCopyAndSum(benchmark::State& state) {
  const auto tile = SomeBytes(kTileBytes);
  std::vector<std::byte> target(kTileBytes);
  for (auto _ : state) benchmark::DoNotOptimize(CopyCrc32c(target.data(), tile));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(kTileBytes));
}
BENCHMARK(TileCopyAndSum);

// Computes the keys of a prompt.
void PageKeys(benchmark::State& state) {
  std::vector<int32_t> tokens(static_cast<size_t>(state.range(0)));
  std::iota(tokens.begin(), tokens.end(), 0);
  for (auto _ : state) benchmark::DoNotOptimize(PageKeysOf(KeyspaceId{}, tokens));
  state.SetItemsProcessed(state.iterations() * state.range(0) / kPageTokens);
}
BENCHMARK(PageKeys)->Arg(4096)->Arg(102400);

// Decodes the header of a page of 36 layers and 8 KV heads.
void DecodeHeader(benchmark::State& state) {
  FragmentHeader header;
  header.tile_bytes = kTileBytes;
  header.range = {{0, 36}, {0, 8}};
  header.tile_sums.resize(static_cast<size_t>(header.range.tiles()));
  std::vector<std::byte> bytes(FragmentHeaderBytes(header.range.tiles()));
  EncodeFragmentHeader(header, bytes);
  for (auto _ : state) benchmark::DoNotOptimize(DecodeFragmentHeader(bytes));
}
BENCHMARK(DecodeHeader);

// Inserts a page into a full tier and evicts one, under each policy.
void PolicyTurnover(benchmark::State& state, const char* name) {
  constexpr size_t kItems = 100000;
  auto policy = storage::MakePolicy(name, kItems);
  if (!policy.ok()) return state.SkipWithError("no such policy");
  uint64_t next = 0;
  const auto insert = [&] {
    (*policy)->BeginAccess();
    (*policy)->Insert({.fingerprint = ++next * 0x9E3779B97F4A7C15u, .parent = storage::kNoItem});
  };
  for (size_t i = 0; i < kItems; ++i) insert();
  for (auto _ : state) {
    const auto victim = (*policy)->Victim([](storage::ItemHandle) { return false; });
    (*policy)->Remove(*victim, storage::Removal::kEvicted);
    insert();
  }
}
BENCHMARK_CAPTURE(PolicyTurnover, lru, "lru");
BENCHMARK_CAPTURE(PolicyTurnover, s3fifo, "s3fifo");
BENCHMARK_CAPTURE(PolicyTurnover, default_policy, "default");

// Opens a store of host memory alone and commits `pages` small pages of one sequence to it.
absl::StatusOr<std::unique_ptr<storage::TieredStore>> StoreWithPages(
    const std::vector<PageKey>& keys, const TileRange& range) {
  constexpr uint32_t kSmallTileBytes = 512;
  storage::StoreOptions options;
  options.host.bytes_max = ByteSize{uint64_t{64} << 20};
  auto store = storage::TieredStore::Open(options, Clock::Real(), {});
  if (!store.ok()) return store.status();
  const std::vector<std::byte> tiles = SomeBytes(kSmallTileBytes);
  FragmentHeader header;
  header.tile_bytes = kSmallTileBytes;
  header.generation = 1;
  header.range = range;
  header.tile_sums = {Crc32c(tiles)};
  for (size_t i = 0; i < keys.size(); ++i) {
    header.key = keys[i];
    header.parent = i == 0 ? PageKey() : keys[i - 1];
    const auto committed =
        (*store)->Commit({.header = header, .tiles = tiles, .logical_tile_bytes = kSmallTileBytes});
    if (!committed.ok()) return committed.status();
  }
  return store;
}

// Acquires a prefix that host memory has, and releases it.
void StoreAcquire(benchmark::State& state) {
  const TileRange range = {{0, 1}, {0, 1}};
  std::vector<PageKey> keys;
  for (int64_t i = 0; i < state.range(0); ++i) {
    keys.push_back(PageKey{Sha256("page " + std::to_string(i))});
  }
  const auto store = StoreWithPages(keys, range);
  if (!store.ok()) return state.SkipWithError(store.status().ToString().c_str());
  for (auto _ : state) {
    storage::AcquireRequest request;
    request.generation = 1;
    request.keys = keys;
    request.range = range;
    storage::LeaseId lease = 0;
    (*store)->Acquire(std::move(request), [&](absl::StatusOr<storage::AcquireResult> result) {
      if (result.ok() && result->hit_pages == keys.size()) lease = result->lease;
    });
    if (!(*store)->Release(lease)) return state.SkipWithError("a page is missing");
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(StoreAcquire)->Arg(1)->Arg(1600);

}  // namespace
}  // namespace crumb::bench

BENCHMARK_MAIN();
