// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "storage/store_stats.h"

namespace crumb::storage {

// An index's record of a fragment.
struct FragmentMeta {
  KeyspaceId keyspace;
  PageKey key;
  PageKey parent;  // zeros for the first page of a sequence
  uint64_t generation = 0;
  TileRange range;
  uint32_t tiles_bytes = 0;
  uint32_t bytes = 0;               // tiles and header
  uint32_t logical_tile_bytes = 0;  // size of one tile in BF16

  uint64_t logical_bytes() const {
    return static_cast<uint64_t>(range.tiles()) * logical_tile_bytes;
  }
  friend bool operator==(const FragmentMeta&, const FragmentMeta&) = default;
};

// Reads the header behind the tiles of `fragment` and checks that it is of the very one that `meta`
// names. kDataLoss otherwise.
absl::StatusOr<FragmentHeader> CheckFragmentHeader(const FragmentMeta& meta,
                                                   std::span<const std::byte> fragment);

// Checks that `fragment`, tiles and then header, is whole and the very one that `meta` names.
// kDataLoss otherwise.
absl::Status VerifyFragment(const FragmentMeta& meta, std::span<const std::byte> fragment);

// A fragment on its way into a tier. `room` begins with meta.bytes of content and may be longer;
// a tier that writes whole blocks writes from there.
struct FragmentWrite {
  FragmentMeta meta;
  std::span<const std::byte> room;
};

// A tier below host memory, by whatever it keeps fragments in. Every call may block on its device
// unless it says otherwise. Thread-safe.
class FragmentTier {
 public:
  using PageFunction = std::function<void(const KeyspaceId&, const PageKey&)>;

  virtual ~FragmentTier() = default;

  // Keeps `fragments`, evicting others, and returns when they are durable. One status each:
  // kAlreadyExists tiles of it are there; kAborted its generation was dropped; kResourceExhausted
  // it can never fit; kUnavailable the tier is off, read-only or failed now.
  virtual std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) = 0;

  // The fragments of a page; empty when it is absent. Does not block.
  virtual std::vector<FragmentMeta> Find(const KeyspaceId& keyspace, const PageKey& key) const = 0;
  // Tiles of a page that are there, of this generation or a newer one. Does not block.
  std::vector<TileRange> Present(const KeyspaceId& keyspace, const PageKey& key,
                                 uint64_t generation) const;
  // Whether all tiles of the fragment are there, in this fragment or in others.
  bool Has(const FragmentMeta& fragment) const;

  // Reads a fragment that Find named into the first bytes of `room`, which has meta.bytes or more,
  // and verifies it; the content of `room` behind the fragment is undefined. kNotFound: the tier no
  // longer has it; kDataLoss: it is damaged, and the page was dropped; kUnavailable: it cannot be
  // read now.
  virtual absl::Status Get(const FragmentMeta& fragment, std::span<std::byte> room) = 0;

  // One access used these pages, in prefix order; absent ones are skipped. Does not block.
  virtual void Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) = 0;

  // Keeps pages from eviction until then; a time that has passed unpins. Returns how many are
  // there. Does not block.
  virtual uint32_t Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                       TimePoint until) = 0;

  // Removes pages and returns how many were there, when no restart can bring any of `keys` back.
  // kUnavailable: the pages are out of sight, but may be there again after a restart; a call that
  // is repeated makes their removal durable.
  virtual absl::StatusOr<uint32_t> Remove(const KeyspaceId& keyspace,
                                          std::span<const PageKey> keys) = 0;

  // Removes all pages of the keyspace with a generation below `generation`, refuses them from now
  // on, and returns how many there were. Error as that of Remove.
  virtual absl::StatusOr<uint64_t> Drop(const KeyspaceId& keyspace, uint64_t generation) = 0;

  // The generation that Drop raised the keyspace to, 0 if never. Does not block.
  virtual uint64_t GenerationOf(const KeyspaceId& keyspace) const = 0;

  // Bytes of the keyspace's fragments here, tiles and headers. Does not block.
  virtual uint64_t KeyspaceBytes(const KeyspaceId& keyspace) const = 0;
  // Number of the keyspace's pages here. Does not block.
  virtual uint64_t KeyspacePages(const KeyspaceId& keyspace) const = 0;

  virtual void ForEachPage(const KeyspaceId& keyspace,
                           const std::function<void(const PageKey&)>& visit) const = 0;

  // Small named records beside the pages, durable on return. An empty value removes the record.
  virtual absl::Status PutRecord(const std::string& name, const std::string& value) = 0;
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const = 0;

  // Makes recency durable, too.
  virtual absl::Status Sync() = 0;

  // kUnavailable with the reason while Put would refuse. Does not block.
  virtual absl::Status Writable() const = 0;

  // Fills stats.ssd and the fields on recovery and verification.
  virtual void AddStats(StoreStats& stats) const = 0;
};

// Listeners to a tier's pages. Called without locks held, from any thread; must not block.
struct FragmentTierEvents {
  FragmentTier::PageFunction added;
  FragmentTier::PageFunction removed;
};

}  // namespace crumb::storage
