// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "storage/fragment_tier.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

using OpenFragmentTier =
    std::function<absl::StatusOr<std::unique_ptr<FragmentTier>>(FragmentTierEvents)>;

// Returns the tier below of a node without SSD. It holds no pages, and keeps records as long as the
// process lives.
std::unique_ptr<FragmentTier> MakeRecordsOnlyTier();

// TieredStore::Open over any tier below, which `open_below` makes; it gets events to report to.
absl::StatusOr<std::unique_ptr<TieredStore>> OpenTieredStore(const StoreOptions& options,
                                                             Clock& clock, StoreEvents events,
                                                             const OpenFragmentTier& open_below,
                                                             StoreStart start = {});

}  // namespace crumb::storage
