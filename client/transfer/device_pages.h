// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/transfer/device_cache.h"
#include "client/transfer/stored_pages.h"
#include "crumb/transfer.h"

namespace crumb::client {

// Loads and stores of a cache in device memory: calls enqueue work. `arena` is the memory that the
// pages of a load lie in. The memory of a store's pages is DeviceCache::AllocatePage's.
//
// The objects hold the cache, the pinned memory and the pages until the device is done with them:
// their destructors wait. A store's pages are settled on the thread "crumb-settle", which waits for
// the copies, reads the status words and queues the pages for publishing.
absl::StatusOr<std::unique_ptr<PageLoad>> NewDevicePageLoad(
    const TransferParts& parts, std::shared_ptr<DeviceCache> cache,
    std::shared_ptr<const PinnedArena> arena, std::span<const int64_t> blocks,
    std::vector<std::shared_ptr<Page>> pages);
absl::StatusOr<std::unique_ptr<PageStore>> NewDevicePageStore(
    const TransferParts& parts, std::shared_ptr<DeviceCache> cache,
    KeyspaceBinder::Binding keyspace, std::span<const int64_t> blocks,
    std::vector<std::shared_ptr<Page>> pages);

}  // namespace crumb::client
