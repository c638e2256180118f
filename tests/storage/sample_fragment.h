// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/fragment_header.h"
#include "storage/fragment_tier.h"
#include "storage/tiered_store.h"

// Fragments whose bytes all follow from their key and range, so that any reader can verify them
// without a copy.
namespace crumb::storage {

struct SampleFragment {
  KeyspaceId keyspace;
  PageKey key;
  PageKey parent;
  uint64_t generation = 1;
  TileRange range = {{0, 2}, {0, 2}};
  uint32_t tile_bytes = 4608;
};

// The `number`-th keyspace, and the `number`-th page of sequence `sequence`.
KeyspaceId SampleKeyspace(uint64_t number);
PageKey SampleKey(uint64_t sequence, uint64_t number);

// The page with its parent; page 0 has none.
SampleFragment SamplePage(uint64_t sequence, uint64_t number);

// Tiles and header.
std::vector<std::byte> BytesOf(const SampleFragment& sample);
FragmentMeta MetaOf(const SampleFragment& sample);
CommitRequest CommitOf(const SampleFragment& sample, std::span<const std::byte> bytes);

// Whether `bytes` are a fragment that BytesOf could have made for its keyspace, key and range.
bool IsRight(std::span<const std::byte> bytes, const KeyspaceId& keyspace, const PageKey& key,
             uint32_t tiles_bytes);

}  // namespace crumb::storage
