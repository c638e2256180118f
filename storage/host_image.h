// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/unique_fd.h"
#include "storage/fragment_tier.h"
#include "storage/loss_ledger.h"
#include "storage/slot_allocator.h"

namespace crumb::storage {

inline constexpr uint16_t kHostImageVersion = 4;

// The image of host memory that a process hands to its successor on the same host:
// docs/formats/host-image.md. Times are of the monotonic clock, which both share.
struct HostImage {
  struct Fragment {
    TileRange range;
    uint32_t tiles_bytes = 0;
    uint32_t bytes = 0;
    uint32_t logical_tile_bytes = 0;
    Slot slot;  // its region is the slab's place among those handed over

    friend bool operator==(const Fragment&, const Fragment&) = default;
  };
  struct Page {
    KeyspaceId keyspace;
    PageKey key;
    PageKey parent;
    uint64_t generation = 0;
    bool was_hit = false;
    TimePoint added;
    TimePoint used;
    TimePoint pinned_until;
    std::vector<Fragment> fragments;

    friend bool operator==(const Page&, const Page&) = default;
  };

  // Pages of a keyspace that were deleted: a process that has not come back to its device pool yet
  // may hold them in its slots.
  struct Deleted {
    KeyspaceId keyspace;
    bool all = false;  // any page of the keyspace may be among them
    std::vector<PageKey> keys;

    friend bool operator==(const Deleted&, const Deleted&) = default;
  };

  uint64_t slab_bytes = 0;
  uint32_t slabs = 0;
  // The tenant of each slab's pages, empty for keyspaces of no tenant. None: slabs are mixed.
  std::vector<std::string> tenants;
  std::vector<std::pair<KeyspaceId, uint64_t>> generations;
  std::vector<std::pair<std::string, std::string>> records;  // empty if a tier below has them
  std::vector<Deleted> deleted;
  // How many slabs were revoked of each tenant, by this process and those before it. Empty: the
  // writer was of a version without them.
  std::map<std::string, uint64_t> revoked;
  // Pages that were lost and not all reported yet. None: the writer was of a version without them.
  std::optional<LossLedger::State> losses;
  // Sorted by last use, least recent first; of pages with the same last use, children come before
  // their parents.
  std::vector<Page> pages;

  friend bool operator==(const HostImage&, const HostImage&) = default;
};

std::string EncodeHostImage(const HostImage& image);

// Trusts nothing: kDataLoss when it is damaged, truncated or impossible; kFailedPrecondition when
// it needs a newer reader. Slots are within the slabs; that they are apart is the adopter's check.
absl::StatusOr<HostImage> DecodeHostImage(std::span<const std::byte> bytes);

// An image with the slabs that it describes.
struct HandedOverMemory {
  HostImage image;
  std::vector<UniqueFd> slabs;  // [image.slabs]
};

}  // namespace crumb::storage
