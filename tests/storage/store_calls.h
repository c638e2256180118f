// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/tiered_store.h"
#include "tests/storage/sample_fragment.h"

// Waiting forms of a store's calls.
namespace crumb::storage {

absl::StatusOr<CommitOutcome> Commit(TieredStore& store, const SampleFragment& sample);

// The first `pages` pages of sequence `sequence`.
AcquireRequest RequestOf(uint64_t sequence, uint64_t pages);

absl::StatusOr<AcquireResult> Acquire(TieredStore& store, AcquireRequest request);

// The pages that are durable, or FlushReport::ToStatus.
absl::StatusOr<uint64_t> Flush(TieredStore& store);
FlushReport FlushPages(TieredStore& store, std::optional<uint64_t> since = std::nullopt,
                       const FlushScope& scope = std::nullopt);

// A HostRoom::MayDepart: pages that the tier below lacks are lost.
inline bool NoneDeparts(const KeyspaceId&, uint64_t) { return false; }

// Whether every leased fragment holds the right bytes.
bool AllRight(TieredStore& store, const AcquireRequest& request, const AcquireResult& result);

// Bytes that the folder's files take on disk, as du counts them.
uint64_t DiskBytesOf(const std::string& folder);

// Small tiers in `folder`; empty: host memory only.
StoreOptions SmallStore(const std::string& folder);

}  // namespace crumb::storage
