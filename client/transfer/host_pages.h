// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/transfer/host_cache.h"
#include "client/transfer/stored_pages.h"
#include "crumb/transfer.h"

namespace crumb::client {

// Loads and stores of a cache in host memory, which are done when a call returns.
//
// A load dequantizes, and a store quantizes, one (layer, KV head) of a page per task of
// WorkerOptions::parallel_for. Streams are ignored. `pages` of a load are leased until it is
// destroyed.
std::unique_ptr<PageLoad> NewHostPageLoad(const TransferParts& parts,
                                          std::shared_ptr<const HostCache> cache,
                                          std::span<const int64_t> blocks,
                                          std::vector<std::shared_ptr<Page>> pages);
std::unique_ptr<PageStore> NewHostPageStore(const TransferParts& parts,
                                            std::shared_ptr<const HostCache> cache,
                                            KeyspaceBinder::Binding keyspace,
                                            std::span<const int64_t> blocks,
                                            std::vector<std::shared_ptr<Page>> pages);

}  // namespace crumb::client
