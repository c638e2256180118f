// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/evict_results.h"

#include <utility>

#include "common/status_macros.h"

namespace crumb::client {
namespace {

constexpr size_t kAlignment = 256;

template <typename T>
T* Next(uint64_t* at, size_t count) {
  T* array = reinterpret_cast<T*>(*at);
  *at += (count * sizeof(T) + 15) / 16 * 16;
  return array;
}

}  // namespace

EvictTable EvictTable::At(uint64_t base, int windows, int tiles) {
  EvictTable table;
  uint64_t at = base;
  table.windows = Next<int32_t>(&at, 1);
  table.ring_address = Next<uint64_t>(&at, windows);
  table.tile_address = Next<uint64_t>(&at, windows);
  table.ring_begin = Next<int32_t>(&at, windows);
  table.position_block = Next<int32_t>(&at, windows);
  table.status = Next<uint32_t>(&at, windows);
  table.sums = Next<uint32_t>(&at, size_t{1} * windows * tiles);
  return table;
}

size_t EvictTable::Bytes(int windows, int tiles) {
  const size_t sums = size_t{4} * windows * tiles;
  const size_t inputs = At(0, windows, tiles).input_bytes();
  return (inputs + sums + kAlignment - 1) / kAlignment * kAlignment;
}

absl::StatusOr<std::unique_ptr<EvictResults>> EvictResults::Create(Device& device, int count,
                                                                   int windows, int tiles) {
  std::unique_ptr<EvictResults> results(new EvictResults(windows));
  const size_t bytes = EvictTable::Bytes(windows, tiles);
  CRUMB_ASSIGN_OR_RETURN(results->memory_, NewPinnedBuffer(device, bytes * count));
  MutexLock lock(&results->mutex_);
  for (int i = 0; i < count; ++i) {
    const auto base = reinterpret_cast<uint64_t>(results->memory_.get() + bytes * i);
    results->idle_.push_back(EvictTable::At(base, windows, tiles));
  }
  return results;
}

EvictResults::Table EvictResults::Take() {
  MutexLock lock(&mutex_);
  while (idle_.empty()) changed_.Wait(&mutex_);
  const EvictTable table = idle_.back();
  idle_.pop_back();
  return Table(new EvictTable(table), [this](const EvictTable* taken) {
    {
      MutexLock giving(&mutex_);
      idle_.push_back(*taken);
      changed_.NotifyAll();
    }
    delete taken;
  });
}

}  // namespace crumb::client
