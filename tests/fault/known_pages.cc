// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/known_pages.h"

#include <algorithm>
#include <cstring>

#include "common/crc32c.h"
#include "common/status_macros.h"

namespace crumb::fault {
namespace {

constexpr int kLayers = 4;
constexpr int kKvHeads = 4;
constexpr int kHeadDim = 128;
constexpr TileRange kRange{{0, kLayers}, {0, kKvHeads}};

uint64_t Mixed(uint64_t value) {
  value ^= value >> 30;
  value *= 0xBF58476D1CE4E5B9u;
  value ^= value >> 27;
  value *= 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

}  // namespace

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const std::string& socket_dir,
                                                        const std::string& name) {
  client::ClientOptions options;
  options.socket_dir = socket_dir;
  options.process_name = name;
  return client::Client::Open(options);
}

absl::StatusOr<KnownPages> KnownPages::Open(client::Client& client) {
  client::KeyspaceSpec spec;
  spec.fields = {{"model", "fault"}};
  spec.layers = kLayers;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.group_size = kHeadDim;
  KnownPages pages;
  CRUMB_ASSIGN_OR_RETURN(pages.keyspace_, client.OpenKeyspace(spec, std::chrono::seconds(5)));
  return pages;
}

PageKey KnownPages::Key(uint64_t number) const {
  uint8_t bytes[8];
  std::memcpy(bytes, &number, sizeof(bytes));
  return ForeignPageKey(keyspace_.id, bytes);
}

size_t KnownPages::tiles_bytes() const {
  return FragmentTilesBytes(kRange.tiles(), keyspace_.int2_tile_bytes);
}

size_t KnownPages::fragment_bytes() const {
  return FragmentBytes(kRange.tiles(), keyspace_.int2_tile_bytes);
}

std::vector<std::byte> KnownPages::Fragment(uint64_t number) const {
  std::vector<std::byte> bytes(fragment_bytes());
  for (size_t i = 0; i + 8 <= tiles_bytes(); i += 8) {
    const uint64_t word = Mixed(number * 0x9E3779B97F4A7C15u + i);
    std::memcpy(bytes.data() + i, &word, 8);
  }
  FragmentHeader header;
  header.tile_bytes = keyspace_.int2_tile_bytes;
  header.generation = keyspace_.generation;
  header.keyspace = keyspace_.id;
  header.key = Key(number);
  header.range = kRange;
  for (int tile = 0; tile < kRange.tiles(); ++tile) {
    header.tile_sums.push_back(
        Crc32c(std::span(bytes).subspan(size_t(tile) * header.tile_bytes, header.tile_bytes)));
  }
  EncodeFragmentHeader(header, std::span(bytes).subspan(tiles_bytes()));
  return bytes;
}

absl::StatusOr<std::vector<client::CommitOutcome>> KnownPages::Publish(client::Client& client,
                                                                       uint64_t first,
                                                                       int count) const {
  CRUMB_ASSIGN_OR_RETURN(auto slots,
                         client.Reserve(count, fragment_bytes(), std::chrono::seconds(5)));
  if (slots.empty()) return absl::ResourceExhaustedError("no staging room");
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto bytes = Fragment(first + i);
    std::copy(bytes.begin(), bytes.end(), slots[i].bytes().begin());
  }
  return client.Commit(keyspace_.id, std::move(slots), tiles_bytes(), std::chrono::seconds(10));
}

absl::StatusOr<bool> KnownPages::ReadBack(client::Client& client, uint64_t number,
                                          Duration timeout) const {
  const PageKey key = Key(number);
  client::AcquireRequest request;
  request.keyspace = keyspace_.id;
  request.generation = keyspace_.generation;
  request.keys = std::span(&key, 1);
  request.timeout = timeout;
  CRUMB_ASSIGN_OR_RETURN(const client::AcquireResult result, client.Acquire(request));
  if (result.hit_pages == 0) return false;
  const auto expected = Fragment(number);
  const auto fragments = result.lease->fragments();
  if (fragments.size() != 1 || fragments[0].tiles.size() != tiles_bytes() ||
      !std::equal(fragments[0].tiles.begin(), fragments[0].tiles.end(), expected.begin())) {
    return absl::DataLossError("page " + std::to_string(number) + " was served with wrong bytes");
  }
  return true;
}

}  // namespace crumb::fault
