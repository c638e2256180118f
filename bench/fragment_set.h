// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/fragment_header.h"
#include "crumb/keyspace_info.h"

namespace crumb::bench {

// INT2 fragments of one size, numbered from 0 as pages of sequences of equal length. Keys and bytes
// follow from the number. There are few different bodies, but together they exceed the caches.
// Immutable after BindKeyspace.
class FragmentSet {
 public:
  // A fragment has as many tiles of 4,608 bytes as come closest to `fragment_bytes`; the number of
  // bodies follows from `bodies_bytes`. Sets with different names have different keys.
  FragmentSet(std::string name, size_t fragment_bytes, size_t bodies_bytes, size_t sequence_pages);

  // Sets the keyspace of headers and keys. REQUIRES: it is called once, before the functions below.
  void BindKeyspace(const KeyspaceId& keyspace, uint64_t generation);

  // Returns the keyspace: one KV head and as many layers as the fragments have tiles.
  client::KeyspaceSpec Spec() const;

  const KeyspaceId& keyspace() const { return keyspace_; }
  uint64_t generation() const { return generation_; }
  TileRange range() const { return {{0, static_cast<uint16_t>(tiles_)}, {0, 1}}; }
  size_t tiles_bytes() const { return FragmentTilesBytes(tiles_, kTileBytes); }
  size_t fragment_bytes() const { return FragmentBytes(tiles_, kTileBytes); }

  // Return the key, the tiles and the header of a page. Pages whose numbers differ by a multiple of
  // the number of bodies have the same tiles.
  PageKey Key(size_t page) const;
  std::span<const std::byte> Tiles(size_t page) const;
  FragmentHeader Header(size_t page) const;

  static constexpr uint32_t kTileBytes = 4608;

 private:
  const std::string name_;
  const int tiles_;
  const size_t sequence_pages_;
  KeyspaceId keyspace_;
  uint64_t generation_ = 0;
  std::vector<std::vector<std::byte>> bodies_;
  std::vector<std::vector<uint32_t>> sums_;  // checksums of each body's tiles
};

}  // namespace crumb::bench
